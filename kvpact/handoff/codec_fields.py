"""Reading of protobuf fields that refuses what is unset, unknown or no number, naming the field."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Generic, TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError, Message

from kvpact.errors import BadRequest

E = TypeVar("E", bound=StrEnum)
M = TypeVar("M", bound=Message)
W = TypeVar("W", bound=int)
DIGEST_BYTES = 32
ID_BYTES = 16


class EnumCodec(Generic[E, W]):
    """Maps a protobuf enum whose values are PREFIX_NAME to a StrEnum with members NAME, one to one."""

    def __init__(self, wire: type[W], prefix: str, members: Iterable[E]) -> None:
        number_of = cast(EnumTypeWrapper, wire).Value
        self._numbers = {member: cast(W, number_of(f"{prefix}_{member.name}")) for member in members}
        self._members = {int(number): member for member, number in self._numbers.items()}

    def encode(self, member: E) -> W:
        """Number on the wire."""
        return self._numbers[member]

    def encode_optional(self, member: E | None) -> W:
        """Number on the wire; UNSPECIFIED for None."""
        return cast(W, 0) if member is None else self._numbers[member]

    def decode(self, number: int, path: str) -> E:
        """Member for a number; refuses UNSPECIFIED and unknown numbers."""
        member = self._members.get(number)
        if member is None:
            found = "UNSPECIFIED" if number == 0 else f"unknown value {number}"
            known = ", ".join(self._members.values())
            raise refusal(path, f"is {found}; expected one of {known}")
        return member

    def decode_optional(self, number: int, path: str) -> E | None:
        """Member for a number; None for UNSPECIFIED."""
        return None if number == 0 else self.decode(number, path)


def refusal(path: str, problem: str) -> BadRequest:
    """Error that names the field at fault."""
    return BadRequest(f"{path} {problem}", param=path)


def parse(kind: type[M], data: bytes, path: str) -> M:
    """Parses a serialised message; refuses bytes that are none."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise refusal(path, f"is no {kind.__name__}: {error}") from error
    return message


def part(message: Message, field: str, path: str) -> str:
    """Path of a sub-message that must be set."""
    where = join(path, field)
    if not message.HasField(field):
        raise refusal(where, "is absent")
    return where


def integer(message: Message, field: str, path: str, *, least: int) -> int:
    """An integer of at least `least`; refuses absence where the field knows it."""
    where = join(path, field)
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    if descriptor.has_presence and not message.HasField(field):
        raise refusal(where, "is absent")
    value = int(getattr(message, field))
    if value < least:
        raise refusal(where, f"is {value}; expected at least {least}" if value else "is absent or 0")
    return value


def optional_integer(message: Message, field: str, path: str, *, least: int) -> int | None:
    """An integer of at least `least`, or None where absent."""
    return integer(message, field, path, least=least) if message.HasField(field) else None


def number(message: Message, field: str, path: str, *, positive: bool) -> float:
    """A finite number, above 0 where `positive`."""
    where = join(path, field)
    value = float(getattr(message, field))
    if not math.isfinite(value):
        raise refusal(where, f"is {value}; expected a finite number")
    if positive and value <= 0:
        raise refusal(where, f"is {value}; expected a number above 0" if value else "is absent or 0")
    return value


def optional_number(message: Message, field: str, path: str, *, positive: bool) -> float | None:
    """A finite number, or None where absent."""
    return number(message, field, path, positive=positive) if message.HasField(field) else None


def numbers(values: Iterable[float], path: str, *, positive: bool = False) -> tuple[float, ...]:
    """Finite numbers, each above 0 where `positive`."""
    read = tuple(values)
    for index, value in enumerate(read):
        if not math.isfinite(value) or (positive and value <= 0):
            raise refusal(
                f"{path}[{index}]", f"is {value}; expected a finite number{' above 0' if positive else ''}"
            )
    return read


def octets(value: bytes, path: str, *, length: int) -> bytes:
    """Exactly `length` bytes."""
    if len(value) != length:
        raise refusal(path, f"has {len(value)} bytes; expected {length}" if value else "is absent")
    return value


def optional_octets(value: bytes, path: str, *, length: int) -> bytes | None:
    """Exactly `length` bytes, or None where empty."""
    return octets(value, path, length=length) if value else None


def text(value: str, path: str) -> str:
    """A string that isn't empty."""
    if not value:
        raise refusal(path, "is absent")
    return value


def join(path: str, field: str) -> str:
    """Dotted path of a field."""
    return f"{path}.{field}" if path else field
