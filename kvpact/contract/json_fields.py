"""Strict reading of one JSON object: a field is there, of its kind, and known, or it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from kvpact.contract.field_checks import brief, is_finite
from kvpact.errors import BadRequest

Word = TypeVar("Word", bound=StrEnum)
_ABSENT = object()


class Fields:
    """Fields of one object. Each is read once; `close` refuses those that nobody read."""

    def __init__(self, where: str, values: Any, *, optional: tuple[str, ...] = ()) -> None:
        """`where` names the object in errors; fields in `optional` may be left unread."""
        self._where = where
        if not isinstance(values, Mapping):
            raise BadRequest(
                f"contract field {where or 'contract'}: found {brief(values)}, expected an object",
                param=where,
            )
        self._values = values
        self._unread = set(values) - set(optional)

    def wrong(self, name: str, found: Any, expected: str) -> BadRequest:
        """The error for a field that can't be used."""
        path = self._path(name)
        return BadRequest(f"contract field {path}: found {brief(found)}, expected {expected}", param=path)

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return name in self._values

    def close(self) -> None:
        """Refuses fields that nobody read."""
        if self._unread:
            path = self._path(min(self._unread))
            raise BadRequest(f"contract field {path} is unknown; remove it", param=path)

    def part(self, name: str, *, optional: tuple[str, ...] = ()) -> Fields:
        """An object."""
        return Fields(self._path(name), self._take(name), optional=optional)

    def optional_part(self, name: str) -> Fields | None:
        """An object or null."""
        value = self._take(name)
        return None if value is None else Fields(self._path(name), value)

    def parts(self, name: str, *, optional: tuple[str, ...] = ()) -> list[Fields]:
        """A list of objects."""
        values = self._list(name)
        return [
            Fields(f"{self._path(name)}[{i}]", value, optional=optional) for i, value in enumerate(values)
        ]

    def text(self, name: str) -> str:
        """Text."""
        value = self._take(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, values, "a list of texts")
        return tuple(values)

    def flag(self, name: str) -> bool:
        """true or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def digest(self, name: str) -> bytes | None:
        """32 bytes in hexadecimal, or null."""
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise self.wrong(name, value, "64 lower-case hexadecimal digits or null")
        return bytes.fromhex(value)

    def word(self, name: str, kind: type[Word]) -> Word:
        """A word of `kind`."""
        return self._word(name, self._take(name), kind)

    def optional_word(self, name: str, kind: type[Word]) -> Word | None:
        """A word of `kind` or null."""
        value = self._take(name)
        return None if value is None else self._word(name, value, kind)

    def whole(self, name: str) -> int:
        """A whole number."""
        return self._whole(name, self._take(name))

    def optional_whole(self, name: str) -> int | None:
        """A whole number or null."""
        value = self._take(name)
        return None if value is None else self._whole(name, value)

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(self._whole(name, value) for value in self._list(name))

    def number(self, name: str) -> float:
        """A finite number."""
        return self._number(name, self._take(name))

    def optional_number(self, name: str) -> float | None:
        """A finite number or null."""
        value = self._take(name)
        return None if value is None else self._number(name, value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        return tuple(self._number(name, value) for value in self._list(name))

    def float32s(self, name: str) -> tuple[float, ...]:
        """A list of numbers, each taken to the nearest float32."""
        with np.errstate(over="ignore"):
            return tuple(float(np.float32(value)) for value in self.numbers(name))

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _take(self, name: str) -> Any:
        value = self._values.get(name, _ABSENT)
        if value is _ABSENT:
            path = self._path(name)
            raise BadRequest(f"contract field {path} is absent; nothing is defaulted, so give it", param=path)
        self._unread.discard(name)
        return value

    def _list(self, name: str) -> list[Any]:
        values = self._take(name)
        if not isinstance(values, list):
            raise self.wrong(name, values, "a list")
        return values

    def _word(self, name: str, value: Any, kind: type[Word]) -> Word:
        try:
            return kind(value)
        except ValueError:
            raise self.wrong(name, value, " or ".join(kind)) from None

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)
