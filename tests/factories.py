"""Tiny values of the house's types for tests: keyword-only, small defaults, one call each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypedDict, Unpack

import numpy as np

from kvpact.contract.contract import (
    Contract,
    LayerGroup,
    Layout,
    ModelIdentity,
    Quantization,
    Rotary,
    RotaryTable,
    Schema,
    Shard,
)
from kvpact.types import (
    AxisOrder,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    RotationSite,
)

FUNCTION_DIGEST = b"f" * 32
LM_HEAD_DIGEST = b"h" * 32
TOKENIZER_DIGEST = b"t" * 32
NATURAL_SITE = {
    KeyState.ROTATED: RotationSite.WRITER,
    KeyState.RAW: RotationSite.READER,
    KeyState.NONE: RotationSite.WRITER,
}


def make_inv_freq(*, theta: float = 1e4, rotary_dim: int = 16) -> tuple[float, ...]:
    """The default table in float32, as Python floats: 1 / theta ** (2 i / rotary_dim)."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return tuple((np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32).tolist())


def make_rotary(
    *,
    key_state: KeyState = KeyState.ROTATED,
    site: RotationSite | None = None,
    rotary_dim: int = 16,
    lane_offset: int = 0,
    stored_lane_order: LaneOrder = LaneOrder.HALF_SPLIT,
    theta: float = 1e4,
    inv_freq: tuple[float, ...] | None = None,
    amplitude: float = 1.0,
) -> Rotary:
    """One frozen table; key_state NONE gives a rotary part without any."""
    table = RotaryTable(
        inv_freq=inv_freq or make_inv_freq(theta=theta, rotary_dim=rotary_dim), amplitude=amplitude
    )
    turns = key_state is not KeyState.NONE
    return Rotary(
        key_state=key_state,
        site=site or NATURAL_SITE[key_state],
        rotary_dim=rotary_dim if turns else 0,
        lane_offset=lane_offset,
        stored_lane_order=stored_lane_order,
        frequency_policy=FrequencyPolicy.FROZEN,
        tables=(table,) if turns else (),
    )


def make_group(
    *,
    layers: Iterable[int] = (0, 1),
    kind: LayerKind = LayerKind.FULL,
    window: int | None = None,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    softmax_scale: float = 0.25,
    rotary: Rotary | None = None,
) -> LayerGroup:
    """Full attention unless told otherwise; the whole head rotates."""
    return LayerGroup(
        layers=tuple(layers),
        kind=kind,
        window=window,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        softmax_scale=softmax_scale,
        softcap=None,
        sinks=False,
        temperature=None,
        latent=None,
        rotary=rotary or make_rotary(rotary_dim=key_dim),
    )


def make_layout(
    *,
    axis_order: AxisOrder = AxisOrder.NHD,
    block_size: int = 16,
    dtype: Dtype = Dtype.FLOAT32,
    kv_heads: int = 2,
    layers: int = 2,
) -> Layout:
    """Keys and values apart, one dtype, unquantised, unsharded."""
    shard = Shard(
        tensor_parallel_rank=0,
        tensor_parallel_size=1,
        head_start=0,
        head_end=kv_heads,
        layer_start=0,
        layer_end=layers,
    )
    return Layout(
        axis_order=axis_order,
        block_size=block_size,
        packing=Packing.SEPARATE,
        key_dtype=dtype,
        value_dtype=dtype,
        byte_order=ByteOrder.LITTLE,
        key_quantization=Quantization(),
        value_quantization=Quantization(),
        shard=shard,
    )


class ContractFacts(TypedDict, total=False):
    """What `make_contract` takes; FACTS has the defaults. None: what follows from the other facts."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int | None
    softmax_scale: float | None
    key_state: KeyState
    site: RotationSite | None
    rotary_dim: int | None
    lane_offset: int
    stored_lane_order: LaneOrder
    theta: float
    inv_freq: tuple[float, ...] | None
    amplitude: float
    axis_order: AxisOrder
    block_size: int
    dtype: Dtype
    compute_dtype: Dtype
    context_tokens: int
    architecture: str
    function_digest: bytes | None
    lm_head_digest: bytes | None
    tokenizer_digest: bytes | None
    name: str
    layer_groups: tuple[LayerGroup, ...] | None


FACTS: ContractFacts = {
    "layers": 2,
    "kv_heads": 2,
    "key_dim": 16,
    "value_dim": None,
    "softmax_scale": None,
    "key_state": KeyState.ROTATED,
    "site": None,
    "rotary_dim": None,
    "lane_offset": 0,
    "stored_lane_order": LaneOrder.HALF_SPLIT,
    "theta": 1e4,
    "inv_freq": None,
    "amplitude": 1.0,
    "axis_order": AxisOrder.NHD,
    "block_size": 16,
    "dtype": Dtype.FLOAT32,
    "compute_dtype": Dtype.FLOAT32,
    "context_tokens": 4096,
    "architecture": "llama",
    "function_digest": FUNCTION_DIGEST,
    "lm_head_digest": LM_HEAD_DIGEST,
    "tokenizer_digest": TOKENIZER_DIGEST,
    "name": "",
    "layer_groups": None,
}


def make_contract(**overrides: Unpack[ContractFacts]) -> Contract:
    """Two llama-like layers, two KV heads of 16 lanes, blocks of 16; `layer_groups` replaces the layers."""
    facts: ContractFacts = {**FACTS, **overrides}
    groups = facts["layer_groups"]
    if groups is None:
        groups = (_group_of(facts),)
    model = ModelIdentity(
        architecture=facts["architecture"],
        function_digest=facts["function_digest"],
        lm_head_digest=facts["lm_head_digest"],
        tokenizer_digest=facts["tokenizer_digest"],
        compute_dtype=facts["compute_dtype"],
        context_tokens=facts["context_tokens"],
        name=facts["name"],
    )
    layout = make_layout(
        axis_order=facts["axis_order"],
        block_size=facts["block_size"],
        dtype=facts["dtype"],
        kv_heads=groups[0].kv_heads,
        layers=sum(len(part.layers) for part in groups),
    )
    return Contract(schema=Schema(), model=model, layer_groups=groups, layout=layout)


def _group_of(facts: ContractFacts) -> LayerGroup:
    key_dim, value_dim, scale = facts["key_dim"], facts["value_dim"], facts["softmax_scale"]
    rotary = make_rotary(
        key_state=facts["key_state"],
        site=facts["site"],
        rotary_dim=key_dim if facts["rotary_dim"] is None else facts["rotary_dim"],
        lane_offset=facts["lane_offset"],
        stored_lane_order=facts["stored_lane_order"],
        theta=facts["theta"],
        inv_freq=facts["inv_freq"],
        amplitude=facts["amplitude"],
    )
    return make_group(
        layers=range(facts["layers"]),
        kv_heads=facts["kv_heads"],
        key_dim=key_dim,
        value_dim=key_dim if value_dim is None else value_dim,
        softmax_scale=key_dim**-0.5 if scale is None else scale,
        rotary=rotary,
    )


def with_layout(contract: Contract, **changes: object) -> Contract:
    """The same contract with some layout fields replaced."""
    return replace(contract, layout=replace(contract.layout, **changes))  # type: ignore[arg-type]


def with_model(contract: Contract, **changes: object) -> Contract:
    """The same contract with some model fields replaced."""
    return replace(contract, model=replace(contract.model, **changes))  # type: ignore[arg-type]


def with_group(contract: Contract, **changes: object) -> Contract:
    """The same contract with some fields replaced in every layer group."""
    groups = tuple(replace(group, **changes) for group in contract.layer_groups)  # type: ignore[arg-type]
    return replace(contract, layer_groups=groups)


def with_rotary(contract: Contract, **changes: object) -> Contract:
    """The same contract with some rotary fields replaced in every layer group."""
    groups = tuple(
        replace(group, rotary=replace(group.rotary, **changes))  # type: ignore[arg-type]
        for group in contract.layer_groups
    )
    return replace(contract, layer_groups=groups)
