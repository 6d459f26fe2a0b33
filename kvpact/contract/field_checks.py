"""Checks of single contract fields: each refuses by the field's name, with what was found and expected."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

from kvpact.errors import BadRequest


def wrong(field: str, found: Any, expected: str) -> BadRequest:
    """The refusal of one contract field."""
    return BadRequest(f"contract field {field}: found {found!r}, expected {expected}", param=field)


def require(holds: bool, field: str, found: Any, expected: str) -> None:
    """Refuses a field unless the condition holds."""
    if not holds:
        raise wrong(field, found, expected)


def require_enum(field: str, value: Any, kind: type[Enum]) -> None:
    """A word of `kind`, set."""
    require(isinstance(value, kind), field, value, " or ".join(str(member.value) for member in kind))


def require_whole(field: str, value: Any, least: int) -> None:
    """A whole number of at least `least`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole and value >= least, field, value, f"a whole number of at least {least}")


def require_finite(field: str, value: Any) -> None:
    """A finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), field, value, "a finite number")


def require_positive(field: str, value: Any) -> None:
    """A finite number above 0."""
    require_finite(field, value)
    require(value > 0, field, value, "a number above 0")
