"""What each known model family has: defaults, those of transformers' config classes, and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpact.errors import UnreadableSource

ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
COMMON_KEYS = frozenset(
    {
        # Tokens, training and bookkeeping: nothing that the attention or the function depends on.
        "model_type",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "_model_name_or_path",
        "tokenizer_class",
        "name_or_path",
        "_attn_implementation",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "initializer_range",
        "attention_dropout",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "pretraining_tp",
        "tie_word_embeddings",
        # Facts with a contract field of their own, or fixed by the tensors' shapes.
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type. `defaults` hold for a key that the config doesn't name."""

    model_type: str
    defaults: Mapping[str, Any]
    function_defaults: Mapping[str, Any]
    """Config facts that change the function and have no contract field, with their defaults."""
    own_keys: frozenset[str]
    """Keys beyond the common ones that the family reads into contract fields."""
    query_key_norm: bool
    heads_divide_hidden: bool
    """Whether hidden_size must be a multiple of the heads although head_dim is given."""

    def value(self, config: Mapping[str, Any], key: str) -> Any:
        """What the config says, or else the family's own default."""
        return config[key] if key in config else self.defaults.get(key, self.function_defaults.get(key))

    def known_keys(self) -> frozenset[str]:
        """Every config key whose meaning is known."""
        return COMMON_KEYS | self.own_keys | frozenset(self.function_defaults)

    def layer_tensors(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """State-dict names inside one layer, without the layer's prefix."""
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        mlp = ("gate_proj", "up_proj", "down_proj")
        names = [f"self_attn.{name}.weight" for name in attention] + [f"mlp.{name}.weight" for name in mlp]
        names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        if self.value(config, "attention_bias"):
            names += [f"self_attn.{name}.bias" for name in attention]
        if self.value(config, "mlp_bias"):
            names += [f"mlp.{name}.bias" for name in mlp]
        if self.query_key_norm:
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        return tuple(names)


LLAMA = Family(
    model_type="llama",
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    function_defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    own_keys=frozenset(),
    query_key_norm=False,
    heads_divide_hidden=True,
)
QWEN3 = Family(
    model_type="qwen3",
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False},
    own_keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    query_key_norm=True,
    heads_divide_hidden=False,
)
FAMILIES = {family.model_type: family for family in (LLAMA, QWEN3)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that `model_type` names.

    Raises:
        UnreadableSource: model_type is absent, or a type that isn't known; lists those that are.
    """
    model_type = config.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str):
        raise UnreadableSource(
            f"model_type: found {model_type!r}, expected one of {known}", source="config", key="model_type"
        )
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnreadableSource(
            f"model_type {model_type!r} isn't known; known are {known}", source="config", key="model_type"
        )
    return family


def unknown_keys(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Config keys that are in no list: nobody knows whether they change the function."""
    return tuple(sorted(key for key in config if key not in family.known_keys()))
