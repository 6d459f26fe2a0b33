"""What transformers itself does for a config: rotary numbers, windows, scales, and the bytes of its cache."""

from __future__ import annotations

import copy
import importlib
import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from kvpact.contract.contract import Rotary
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.tables import table_at
from kvpact.types import KeyState

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ALL_HEADS: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
HEADS_16: dict[str, Any] = SMALL | {"head_dim": 16}
WINDOW: dict[str, Any] = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama4_text": HEADS_16
    | {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8},
    "mistral": SMALL | WINDOW,
    "ministral3": HEADS_16,
    "qwen2": SMALL | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": HEADS_16 | WINDOW,
    "qwen2_moe": SMALL | MOE | WINDOW | {"use_sliding_window": True, "shared_expert_intermediate_size": 32},
    "qwen3_moe": HEADS_16 | MOE | WINDOW | {"use_sliding_window": True},
    "gemma": HEADS_16,
    "gemma2": HEADS_16 | WINDOW | {"query_pre_attn_scalar": 24},
    "gemma3_text": HEADS_16 | WINDOW | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    "gemma4_text": HEADS_16
    | WINDOW
    | {
        "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "phi": SMALL,
    "phi3": SMALL | WINDOW,
    "gpt_neox": ALL_HEADS,
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "rotary_dim": 8, "vocab_size": 64},
    "stablelm": SMALL,
    "glm": HEADS_16,
    "glm4": HEADS_16,
    "glm4_moe": HEADS_16 | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "minimax_m2": HEADS_16 | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "cohere": SMALL,
    "cohere2": SMALL | WINDOW,
    "olmo2": SMALL,
    "olmo3": SMALL | WINDOW,
    "smollm3": SMALL,
    "granite": SMALL | {"attention_multiplier": 0.3},
    "exaone4": SMALL | WINDOW,
    "gpt_oss": HEADS_16 | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "starcoder2": SMALL | WINDOW,
    "falcon": ALL_HEADS,
    "qwen2_vl_text": SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "qwen3_vl_text": HEADS_16
    | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
}  # fmt: skip
"""Every family that transformers can build, small enough to run."""


def own_config(config: dict[str, Any]) -> Any:
    """transformers' config object; the text part's where there is one."""
    rest = {key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"}
    if "attn_temperature_tuning" in rest:
        rest["attn_temperature_tuning"] = bool(rest["attn_temperature_tuning"])
    return AutoConfig.for_model(config["model_type"], **rest)


def _module(model_type: str) -> Any:
    name = model_type.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def own_rotary(config: dict[str, Any]) -> Any:
    """The family's rotary module, alone."""
    names = [name for name in vars(_module(config["model_type"])) if name.endswith("RotaryEmbedding")]
    (name,) = [name for name in names if "Vision" not in name and "Audio" not in name]
    return getattr(_module(config["model_type"]), name)(own_config(config))


def own_table(rotary: Any, layer_type: str | None = None) -> tuple[np.ndarray, float]:
    """Inverse frequencies and amplitude of one layer type."""
    prefix = f"{layer_type}_" if layer_type and hasattr(rotary, f"{layer_type}_inv_freq") else ""
    return (
        getattr(rotary, f"{prefix}inv_freq").numpy(),
        float(getattr(rotary, f"{prefix}attention_scaling", 1.0)),
    )


def own_model(config: dict[str, Any]) -> Any:
    """A seeded model without head, ready to run in float32; kept, so that a config is built once."""
    return _built(json.dumps(config))


@lru_cache
def _built(written: str) -> Any:
    config = json.loads(written)
    module = _module(config["model_type"])
    text = [name for name in vars(module) if name.endswith("TextModel") and "PreTrained" not in name]
    plain = [name for name in vars(module) if name.endswith("Model") and "PreTrained" not in name]
    name = (text or sorted(plain, key=len))[0]
    torch.manual_seed(0)
    settings = own_config(config)
    settings._attn_implementation = "eager"
    return getattr(module, name)(settings).eval()


def own_attentions(model: Any) -> list[Any]:
    """Attention modules in the order of their layers."""
    found = [part for part in model.modules() if hasattr(part, "layer_idx") and hasattr(part, "is_causal")]
    unique = {part.layer_idx: part for part in found}
    return [unique[layer] for layer in sorted(unique)]


@torch.inference_mode()
def own_keys(model: Any, positions: list[int], *, latent: bool = False) -> torch.Tensor:
    """Keys [T, H, D] of layer 0 in transformers' own cache, after tokens 1, 2, ... at these positions."""
    cache = DynamicCache()
    ids = torch.arange(1, len(positions) + 1)[None]
    model(input_ids=ids, position_ids=torch.tensor([positions]), cache=cache, use_cache=True)
    layer = cache.layers[0]
    keys = torch.cat((layer.keys, layer.values), dim=-1) if latent else layer.keys
    return keys[0].transpose(0, 1).float()


def expected_keys(rotary: Rotary, at_zero_THD: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Keys that the contract's numbers make of those that stood at position 0."""
    if rotary.key_state is KeyState.NONE:
        return at_zero_THD
    table = table_at(rotary, length=max(positions) + 1, context_tokens=max(positions) + 1)
    assert table is not None
    start, end = rotary.lane_offset, rotary.lane_offset + rotary.rotary_dim
    raw_THD = at_zero_THD.clone()
    raw_THD[..., start:end] /= table.amplitude
    return rotate(raw_THD, rotation_at(rotary, table, torch.tensor(positions)))
