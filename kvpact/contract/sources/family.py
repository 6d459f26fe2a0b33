"""What one model family is, as a record: defaults, spellings, and the rules by which its layers attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvpact.types import LaneOrder

PLAIN_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
COMMON_KEYS = frozenset(
    {
        # Tokens, training and bookkeeping: nothing that the attention or the function depends on.
        *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "auto_map"),
        *("_name_or_path", "_model_name_or_path", "name_or_path", "tokenizer_class", "_attn_implementation"),
        *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("initializer_range", "attention_dropout", "use_cache", "return_dict", "output_attentions"),
        *("output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id"),
        *("problem_type", "pretraining_tp", "tie_word_embeddings", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("hidden_dropout", "classifier_dropout", "residual_dropout", "embedding_dropout", "is_decoder"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "num_nextn_predict_layers"),
        *("num_mtp_layers"),
        # Facts with a contract field of their own, or fixed by the tensors' shapes.
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_dim"),
        *("rotary_pct", "rotary_emb_base", "original_max_position_embeddings", "layer_types"),
    }
)


class WindowRule(StrEnum):
    """Which layers see a window only."""

    NEVER = "never"
    ALL = "all"
    """Every layer, if sliding_window is a number."""
    ALL_IF_ON = "all_if_on"
    """Every layer, if use_sliding_window is true too."""
    FROM_LAYER = "from_layer"
    """Layers from max_window_layers on, if use_sliding_window is true."""
    ALTERNATE_BELOW = "alternate_below"
    """Even layers below max_window_layers, if use_sliding_window is true."""
    PATTERN = "pattern"
    """All but every sliding_window_pattern-th."""
    PATTERN_LAST_FULL = "pattern_last_full"
    """As PATTERN, and the last layer sees everything."""
    UNROTATED = "unrotated"
    """Layers without rotary embedding, if use_sliding_window is true."""
    CHUNKED_ROTATED = "chunked_rotated"
    """Layers with rotary embedding attend in chunks of attention_chunk_size."""


class RotatedLayers(StrEnum):
    """Which layers turn their keys."""

    ALL = "all"
    WINDOWED = "windowed"
    WINDOWED_IF_ANY = "windowed_if_any"
    """Those with a window, or all if sliding_window is null."""
    LISTED = "listed"
    """Those with a 1 in no_rope_layers; empty or absent: all but every no_rope_layer_interval-th."""


class SoftmaxScale(StrEnum):
    """Where the factor on attention scores comes from."""

    HEAD_DIM = "head_dim"
    """1 / sqrt(key lanes)."""
    QUERY_SCALAR = "query_pre_attn_scalar"
    """1 / sqrt(that config number)."""
    MULTIPLIER = "attention_multiplier"
    """That config number."""
    ONE = "one"
    LATENT = "latent"
    """1 / sqrt(key lanes), times the square of yarn's weight for mscale_all_dim."""


class Temperature(StrEnum):
    """Position-dependent factor on queries."""

    NONE = "none"
    LLAMA4 = "llama4"
    """Layers without rotary embedding: ln(1 + floor((p + 1) / floor_scale)) * attn_scale + 1."""
    MINISTRAL3 = "ministral3"
    """All layers: 1 + llama_4_scaling_beta * ln(1 + floor(p / original context))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type. `defaults` hold for keys that a config doesn't name; a key in neither is required."""

    model_type: str
    defaults: Mapping[str, Any]
    function_defaults: Mapping[str, Any]
    """Config facts that change the function and have no contract field, with their defaults."""
    own_keys: frozenset[str] = frozenset()
    """Keys beyond the common ones whose meaning is known: contract fields and tensor shapes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of config keys."""
    transformers_has: bool = True
    """Whether transformers can build the model without code from elsewhere."""

    heads_divide_hidden: bool = False
    """Whether hidden_size must be a multiple of the heads although head_dim is given."""
    head_dim_is_given: bool = True
    """Whether head_dim may differ from hidden_size / heads."""
    shares_kv_heads: bool = True
    """Whether there may be fewer KV heads than query heads."""
    latent: bool = False
    """Multi-head latent attention."""

    rope_types: tuple[str, ...] = PLAIN_ROPE_TYPES
    rope_type_names: Mapping[str, str] = field(default_factory=dict)
    """Names under which this family alone knows a rope type."""
    partial_rotation: float | None = None
    """Default share of the lanes that turn; None: the family turns whole heads only."""
    rotary_dim_is_required: bool = False
    """Whether a config has to say how many lanes turn."""
    rope_by_layer_type: bool = False
    default_rope: Mapping[str, Any] | None = None
    """Rotary settings of a config that has neither section."""
    rotated: RotatedLayers = RotatedLayers.ALL
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    weight_lane_order: LaneOrder = LaneOrder.HALF_SPLIT
    """How rotary rows of q and k projections lie in the weights."""
    cache_lane_order: LaneOrder = LaneOrder.HALF_SPLIT
    """How rotary lanes lie in the bytes of transformers' own cache."""

    windows: WindowRule = WindowRule.NEVER
    softmax_scale: SoftmaxScale = SoftmaxScale.HEAD_DIM
    softcap_key: str | None = None
    sinks: bool = False
    temperature: Temperature = Temperature.NONE
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of which only these values are served; the first is the default."""

    def value(self, config: Mapping[str, Any], key: str) -> Any:
        """What the config says, or else the family's own default."""
        return config[key] if key in config else self.defaults.get(key, self.function_defaults.get(key))

    def known_keys(self) -> frozenset[str]:
        """Every config key whose meaning is known."""
        spelled = frozenset(self.aliases) | self.own_keys | frozenset(self.refused)
        return COMMON_KEYS | spelled | frozenset(self.function_defaults) | frozenset(self.defaults)


def sizes(
    hidden_size: int, layers: int, heads: int, kv_heads: int | None, context: int, head_dim: int | None = None
) -> dict[str, Any]:
    """Default sizes of a family; head_dim None: hidden_size / heads."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
