"""Checked numbers from a config: what was found, what was expected, under which key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvpact.errors import UnreadableSource


def wrong_value(key: str, found: Any, expected: str) -> UnreadableSource:
    """The error for a value that can't be used."""
    return UnreadableSource(f"{key}: found {found!r}, expected {expected}", source="config", key=key)


def positive_int(key: str, value: Any) -> int:
    """`value` if it is a whole number of at least 1; raises UnreadableSource otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong_value(key, value, "a whole number of at least 1")
    return value


def positive_number(key: str, value: Any) -> float:
    """`value` if it is a finite number above 0 that float32 holds; raises UnreadableSource otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong_value(key, value, "a finite number above 0")
    if not float(np.finfo(np.float32).tiny) <= float(value) <= float(np.finfo(np.float32).max):
        raise wrong_value(key, value, "a number that float32 holds")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """`value` if it is true or false; raises UnreadableSource otherwise."""
    if not isinstance(value, bool):
        raise wrong_value(key, value, "true or false")
    return value
