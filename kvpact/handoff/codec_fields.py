"""Reading of protobuf fields that refuses what is unset, unknown or no number, naming the field."""

from __future__ import annotations

import math
import re
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
NAME_CHARACTERS = 253
ENDPOINT_CHARACTERS = 300
SHOWN_CHARACTERS = 64
TOLD_CHARACTERS = 4096
_ENDPOINT = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})", re.ASCII
)
_SCHEMES = frozenset({"dns", "unix", "unix-abstract", "vsock", "ipv4", "ipv6", "xds", "google-c2p"})
"""Where gRPC finds one of them before the colon, it reads something else than a host."""


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


def name(value: str, path: str) -> str:
    """A name as logs, labels and files show it: 1 to 253 printable characters."""
    text(value, path)
    if len(value) > NAME_CHARACTERS:
        raise refusal(path, f"has {len(value)} characters; at most {NAME_CHARACTERS} are taken")
    if not value.isprintable():
        raise refusal(path, "holds characters that aren't printable")
    return value


def endpoint(value: str, path: str) -> str:
    """host:port of a name, an IPv4 address or an IPv6 address in brackets; no scheme, no path."""
    found = _ENDPOINT.fullmatch(value[: ENDPOINT_CHARACTERS + 1])
    if found is None or found["host"].lower() in _SCHEMES or not 0 < int(found["port"]) < 65_536:
        raise refusal(path, f"is {shown(value)}; expected host:port")
    return value


def shown(value: str) -> str:
    """A foreign string, quoted, escaped and cut."""
    return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 1] + "…")


def told(value: str) -> str:
    """A foreign sentence for people and logs, never refused: cut, and one line of printable characters."""
    value = value if len(value) <= TOLD_CHARACTERS else value[: TOLD_CHARACTERS - 1] + "…"
    return value if value.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in value)


def join(path: str, field: str) -> str:
    """Dotted path of a field."""
    return f"{path}.{field}" if path else field
