"""Checks of single contract fields: each refuses by the field's name, with what was found and expected."""

from __future__ import annotations

import math
import reprlib
from enum import Enum
from typing import Any

from kvpact.errors import BadRequest

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 3, 120, 240, 40
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 12


def wrong(field: str, found: Any, expected: str) -> BadRequest:
    """The refusal of one contract field."""
    return BadRequest(f"contract field {field}: found {brief(found)}, expected {expected}", param=field)


def brief(found: Any) -> str:
    """A value for an error: the first parts of a long or deep one, looked at no further than shown."""
    return _BRIEF.repr(found)


def is_finite(value: int | float) -> bool:
    """Whether it is a finite float, or a whole number that one can be made of."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


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


def require_size(field: str, value: Any, most: int) -> None:
    """A whole number from 1 to `most`."""
    require_whole(field, value, 1)
    require(value <= most, field, value, f"at most {most}")


def require_finite(field: str, value: Any) -> None:
    """A finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and is_finite(value), field, value, "a finite number")


def require_positive(field: str, value: Any) -> None:
    """A finite number above 0."""
    require_finite(field, value)
    require(value > 0, field, value, "a number above 0")
