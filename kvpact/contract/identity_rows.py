"""Rotary rows of query and key weights, from adjacent pairs to half-split and back, other rows kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.sources.function_facts import RotaryLanes
from kvpact.errors import UnreadableSource

Rows = NDArray[np.float32]
Turn = Callable[[Rows, int], Rows]
BY_HEAD = frozenset({"q_proj", "k_proj", "q_b_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm"})
"""Projections, their biases and norms whose rows are whole heads of queries or of keys."""
QUERIES_KEYS_VALUES = "qkv_proj"
"""All query heads, all key heads, all value heads."""
GROUPED = "query_key_value"
"""For each KV head its query heads, its key, its value."""
LATENT = "kv_a_proj_with_mqa"
"""Latent rows, then the rotary rows that all heads share."""


def half_split_rows(values: Rows, head_dim: int) -> Rows:
    """Rows [heads * head_dim, ...] from adjacent to half-split: row 2i to i, 2i + 1 to i + head_dim / 2."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def adjacent_rows(values: Rows, head_dim: int) -> Rows:
    """The inverse of half_split_rows."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def carries_rotary_rows(name: str) -> bool:
    """Whether rows of a tensor run over rotary lanes: query and key projections, their biases and norms."""
    return _part(name) is not None


def reordered(name: str, values: Rows, lanes: RotaryLanes, *, to_adjacent: bool = False) -> Rows:
    """The tensor with its rotary rows in the other order; every other row stays where it is.

    Raises:
        UnreadableSource: the tensor's rows aren't whole heads.
    """
    part = _part(name)
    if part is None:
        return values
    turn = adjacent_rows if to_adjacent else half_split_rows
    shape = values.shape
    width = lanes.head_dim
    try:
        if part == LATENT:
            return _turned(values, lanes.latent_rows or 0, lanes.count, turn)
        if part == QUERIES_KEYS_VALUES:
            turned = shape[0] - lanes.kv_heads * width
            heads = values[:turned].reshape(-1, width, *shape[1:])
            return np.concatenate([_heads(heads, lanes, turn).reshape(turned, *shape[1:]), values[turned:]])
        if part == GROUPED:
            groups = values.reshape(lanes.kv_heads, -1, width, *shape[1:])
            keys = groups[:, :-1]
            turned_keys = _heads(keys.reshape(-1, width, *shape[1:]), lanes, turn).reshape(keys.shape)
            return np.concatenate([turned_keys, groups[:, -1:]], axis=1).reshape(shape)
        flat = values.reshape(-1, width) if _lanes_last(name, values, width) else values
        heads = flat.reshape(-1, width, *flat.shape[1:]) if flat is values else flat
        return _heads(heads, lanes, turn).reshape(shape)
    except ValueError as error:
        raise UnreadableSource(
            f"tensor {name} of shape {list(shape)} doesn't hold whole heads of {width} lanes",
            source="weights",
            key=name,
        ) from error


def _part(name: str) -> str | None:
    words = name.split(".")
    for word in reversed(words):
        if word in BY_HEAD or word in (QUERIES_KEYS_VALUES, GROUPED, LATENT):
            return word
    return None


def _lanes_last(name: str, values: Rows, width: int) -> bool:
    """Norms of some families are [heads, lanes], one row a head."""
    return "norm" in (_part(name) or "") and values.ndim == 2 and values.shape[1] == width


def _heads(heads: Rows, lanes: RotaryLanes, turn: Turn) -> Rows:
    """Heads [H, head_dim, ...] with the rotary lanes of each in the other order."""
    stop = lanes.start + lanes.count
    middle = heads[:, lanes.start : stop]
    turned = turn(middle.reshape(-1, *heads.shape[2:]), lanes.count).reshape(middle.shape)
    return np.concatenate([heads[:, : lanes.start], turned, heads[:, stop:]], axis=1)


def _turned(values: Rows, start: int, count: int, turn: Turn) -> Rows:
    if values.shape[0] != start + count:
        raise ValueError("rows")
    return np.concatenate([values[:start], turn(values[start:], count)])
