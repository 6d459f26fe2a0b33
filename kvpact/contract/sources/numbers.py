"""Checked numbers from a config: what was found, what was expected, under which key."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from kvpact.errors import UnreadableSource

LARGEST_INT = 2**31 - 1
MOST_LAYERS = 10_000
MOST_HEADS = 65_536
WIDEST_HEAD = 65_536
"""Lanes of one part of a head."""
MOST_EXPERTS = 100_000
"""Of all layers together: each adds three tensors."""
MOST_NORMED_HEADS = 1024
_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 16
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 60


def wrong_value(key: str, found: Any, expected: str) -> UnreadableSource:
    """The error for a value that can't be used."""
    return UnreadableSource(f"{key}: found {shown(found)}, expected {expected}", source="config", key=key)


def shown(value: Any) -> str:
    """A value for people: the middle of a long one, and what lies deep in it, left out."""
    return _SHORT.repr(value)


def positive_int(key: str, value: Any, at_most: int = LARGEST_INT) -> int:
    """`value` if it is a whole number from 1 to `at_most`; raises UnreadableSource otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong_value(key, value, "a whole number of at least 1")
    if value > at_most:
        raise wrong_value(key, value, f"at most {at_most}")
    return value


def positive_number(key: str, value: Any) -> float:
    """`value` if it is a finite number above 0 that float32 holds; raises UnreadableSource otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong_value(key, value, "a finite number above 0")
    if not float(np.finfo(np.float32).tiny) <= value <= float(np.finfo(np.float32).max):
        raise wrong_value(key, value, "a number that float32 holds")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """`value` if it is true or false; raises UnreadableSource otherwise."""
    if not isinstance(value, bool):
        raise wrong_value(key, value, "true or false")
    return value
