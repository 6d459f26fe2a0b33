"""Which model families are known, and which one a config belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.contract.sources.families_gemma import GEMMA_AND_VISION
from kvpact.contract.sources.families_llama import LLAMA_LIKE
from kvpact.contract.sources.families_other import OTHER
from kvpact.contract.sources.family import Family
from kvpact.errors import UnreadableSource

__all__ = ["FAMILIES", "ROPE_KEYS", "ROPE_SECTIONS", "TEXT_TYPES", "Family", "family_of", "unknown_keys"]

ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "mrope_section",
    "mrope_interleaved",
    "llama_4_scaling_beta",
)
FAMILIES = {family.model_type: family for family in (*LLAMA_LIKE, *OTHER, *GEMMA_AND_VISION)}
TEXT_TYPES = {
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""Model types with a text part, and that part's type."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that `model_type` names, of the text part where there is one.

    Raises:
        UnreadableSource: model_type is absent, or a type that isn't known; lists those that are.
    """
    text = config.get("text_config")
    outer = config.get("model_type")
    model_type = text.get("model_type", outer) if isinstance(text, Mapping) else outer
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str):
        raise UnreadableSource(
            f"model_type: found {model_type!r}, expected one of {known}", source="config", key="model_type"
        )
    family = FAMILIES.get(TEXT_TYPES.get(model_type, model_type))
    if family is None:
        raise UnreadableSource(
            f"model_type {model_type!r} isn't known; known are {known}", source="config", key="model_type"
        )
    return family


def unknown_keys(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Config keys that are in no list: nobody knows whether they change the function."""
    return tuple(sorted(key for key in config if key not in family.known_keys()))
