"""The contract: what the bytes of one side's cache mean, as frozen values.

A layer group shares every fact; a group lists its layers. Numbers are shipped as numbers: inverse frequencies
are float32 values held in Python floats, so equality is equality of bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.types import (
    AxisOrder,
    Basis,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    RotationSite,
    ScaleSource,
)

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
KNOWN_FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Version of the contract's own form."""

    major: int = SCHEMA_MAJOR
    minor: int = SCHEMA_MINOR
    required_features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The function that made the cache. Digests are SHA-256 (32 bytes); None means unknown."""

    architecture: str
    function_digest: bytes | None
    lm_head_digest: bytes | None
    tokenizer_digest: bytes | None
    compute_dtype: Dtype
    context_tokens: int
    name: str = ""
    revision: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """Numbers that turn a position into angles: angle_i = float32(position) * float32(inv_freq_i)."""

    inv_freq: tuple[float, ...]
    """rotary_dim / 2 float32 values, radians per position."""
    amplitude: float
    """Factor on cos and sin, above 0. Rotated keys carry it once, raw keys not at all."""
    upper_length: int | None = None
    """Largest length, in tokens and inclusive, that takes this table; None: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFormula:
    """Recipe of a table for policies in which every length has its own."""

    name: str
    parameters: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotation of one group's keys. key_state NONE has rotary_dim 0 and no tables."""

    key_state: KeyState
    site: RotationSite
    rotary_dim: int
    lane_offset: int
    stored_lane_order: LaneOrder
    frequency_policy: FrequencyPolicy
    tables: tuple[RotaryTable, ...]
    """In the order of their upper lengths; the shortest first."""
    formula: FrequencyFormula | None = None
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    basis: Basis = Basis.IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature:
    """Position-dependent query temperature."""

    formula: str
    parameters: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Shape of one latent row of multi-head latent attention."""

    latent_dim: int
    rope_dim: int
    content_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share every fact below."""

    layers: tuple[int, ...]
    kind: LayerKind
    window: int | None
    """Visible keys, self included (SLIDING), or chunk length (CHUNKED); None otherwise."""
    kv_heads: int
    """KV heads of the whole model."""
    key_dim: int
    value_dim: int
    softmax_scale: float
    softcap: float | None
    sinks: bool
    temperature: AttentionTemperature | None
    latent: LatentDims | None
    rotary: Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Map between stored and real numbers: real = stored * scale, at least one for each layer and side."""

    scheme: QuantizationScheme = QuantizationScheme.NONE
    granularity: QuantizationGranularity | None = None
    scale_source: ScaleSource | None = None
    fixed_scales: tuple[float, ...] = ()
    """By layer and, for granularity HEAD, then by head of the whole model; shipped scales aren't here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part of the model that a worker holds; ranges are half open.

    Heads are those of the group with most of them; a group with fewer splits in the same proportion.
    """

    tensor_parallel_rank: int
    tensor_parallel_size: int
    head_start: int
    head_end: int
    layer_start: int
    layer_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the bytes of a block lie."""

    axis_order: AxisOrder
    block_size: int
    packing: Packing
    key_dtype: Dtype
    value_dtype: Dtype
    byte_order: ByteOrder
    key_quantization: Quantization
    value_quantization: Quantization
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Contract:
    """The whole meaning of one side's cache."""

    schema: Schema
    model: ModelIdentity
    layer_groups: tuple[LayerGroup, ...]
    layout: Layout

    def layer_count(self) -> int:
        """Number of layers of the model."""
        return sum(len(group.layers) for group in self.layer_groups)

    def group_of(self, layer: int) -> LayerGroup:
        """The group that holds `layer`; KeyError if none does."""
        for group in self.layer_groups:
            if layer in group.layers:
                return group
        raise KeyError(layer)
