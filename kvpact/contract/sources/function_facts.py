"""What besides the weights decides a model's function, and which tensors count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpact.contract.sources.families import family_of
from kvpact.contract.sources.heads import head_dim_of, layer_count_of
from kvpact.contract.sources.numbers import flag
from kvpact.types import LaneOrder

SAME_FUNCTION = {"swish": "silu"}
"""Spellings of one activation."""
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFacts:
    """Facts of one model that its function digest needs beside its tensors' values."""

    values: Mapping[str, Any]
    """Architecture and the config facts that change the function, class defaults left out."""
    tensors: frozenset[str]
    """State-dict names that count, lm_head left out."""
    head_dim: int
    weight_lane_order: LaneOrder
    """How rotary rows of q and k projections lie in the weights that are given."""
    vocabulary_size: int | None
    """Tokenizer's size; embedding rows beyond it are left out. None: unknown, all rows count."""
    tied: bool
    """Whether the output head is the embedding."""


def function_facts(
    config: Mapping[str, Any],
    *,
    vocabulary_size: int | None = None,
    weight_lane_order: LaneOrder = LaneOrder.HALF_SPLIT,
) -> FunctionFacts:
    """Facts of the model that `config` describes. Raises UnreadableSource for a config that can't be read."""
    family = family_of(config)
    values: dict[str, Any] = {"architecture": family.model_type}
    for key, default in family.function_defaults.items():
        value = _canonical(family.value(config, key))
        if value != _canonical(default):
            values[key] = value
    layers = range(layer_count_of(config, family))
    inner = family.layer_tensors(config)
    names = {f"model.layers.{layer}.{name}" for layer in layers for name in inner}
    return FunctionFacts(
        values=values,
        tensors=frozenset(names | {EMBEDDING, FINAL_NORM}),
        head_dim=head_dim_of(config, family),
        weight_lane_order=weight_lane_order,
        vocabulary_size=vocabulary_size,
        tied=flag("tie_word_embeddings", family.value(config, "tie_word_embeddings")),
    )


def carries_rotary_rows(name: str) -> bool:
    """Whether a tensor's rows run over rotary lanes: q and k projections, their biases and norms."""
    return name.rsplit(".", 2)[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return float(np.float32(value))
    return SAME_FUNCTION.get(value, value) if isinstance(value, str) else value
