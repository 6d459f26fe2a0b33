"""How one side chooses to keep its cache, and how that choice is written in flags."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvpact.config import CacheConfig
from kvpact.errors import BadRequest
from kvpact.types import AxisOrder, Dtype, KeyState, LaneOrder

CACHE_KEYS = ("key_state", "axis_order", "block_size", "dtype", "stored_lane_order")
ALLOWED_VALUES = {
    "key_state": "raw or rotated",
    "axis_order": "NHD or HND",
    "block_size": "a whole number from 1 to 1024",
    "dtype": ", ".join(Dtype),
    "stored_lane_order": "half_split or adjacent",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """Form of a cache; the values here are the engine's defaults. dtype None means the compute dtype."""

    key_state: KeyState = KeyState.ROTATED
    axis_order: AxisOrder = AxisOrder.NHD
    block_size: int = 16
    dtype: Dtype | None = None
    stored_lane_order: LaneOrder = LaneOrder.HALF_SPLIT
    latent: bool = False
    """Whether multi-head latent attention keeps one latent row for all heads instead of expanded ones."""


def from_config(cache: CacheConfig) -> CacheChoice:
    """The choice that a role's settings make."""
    return CacheChoice(
        key_state=cache.key_state,
        axis_order=cache.axis_order,
        block_size=cache.block_size,
        dtype=cache.dtype,
        stored_lane_order=cache.stored_lane_order,
    )


def choice_from_settings(settings: Mapping[str, Any]) -> CacheChoice:
    """The choice that cache keys make over the defaults.

    Raises:
        BadRequest: a key is unknown (names the nearest) or a value isn't allowed (names what is).
    """
    for key in settings:
        _check_key(key)
    try:
        return from_config(CacheConfig.model_validate(dict(settings)))
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise BadRequest(
            f"cache key {key}: found {settings[key]!r}, expected {ALLOWED_VALUES[key]}", param=f"cache.{key}"
        ) from error


def parse_cache_settings(text: str) -> dict[str, Any]:
    """Cache keys from "key=value,key=value", checked.

    Raises:
        BadRequest: not of this form, an unknown or repeated key, or a value that isn't allowed.
    """
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            raise BadRequest(f"found {part!r}, expected key=value, for example key_state=raw", param="cache")
        if key in settings:
            raise BadRequest(f"cache key {key} is given twice; keep one", param=f"cache.{key}")
        _check_key(key)
        settings[key] = int(value) if value.isascii() and value.isdigit() else value
    choice_from_settings(settings)
    return settings


def _check_key(key: str) -> None:
    if key in CACHE_KEYS:
        return
    nearest = difflib.get_close_matches(key, CACHE_KEYS, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(CACHE_KEYS)}"
    raise BadRequest(f"cache key {key} is unknown{hint}", param=f"cache.{key}")
