"""Hostile bytes: every message of the protocol, how it is read, and the ways to make it wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from coordinator.service import registration_of
from kvpact.errors import KvpactError
from kvpact.handoff import codec
from kvpact.handoff import codec_fields as fields
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.status import status_from_bytes, status_to_bytes
from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2

Read = Callable[[bytes], object]


def _reader(kind: Any, decode: Callable[[Any], object]) -> Read:
    return lambda data: decode(fields.parse(kind, data, "message"))


def _offer(message: decode_pb2.PairRequest) -> object:
    offer = codec.decode_offer(message)
    return codec.contract_from_bytes(offer.contract, schema_major=offer.schema_major)


def _renewal(message: handoff_pb2.RenewRequest) -> object:
    return codec.decode_life(message.worker), codec.decode_handoff_id(message.handoff_id)


def _release(message: handoff_pb2.ReleaseRequest) -> object:
    return codec.decode_handoff_id(message.handoff_id), codec.decode_reason(message.reason)


def _digests(message: handoff_pb2.GetVerdictRequest) -> object:
    return [codec.decode_digest(found, "digest") for found in (message.writer_digest, message.reader_digest)]


def _heartbeat(message: coordinator_pb2.HeartbeatRequest) -> object:
    life = codec.decode_life(message.worker)
    return life, codec.decode_counters(message.counters), codec.decode_load(message.load)


READERS: dict[str, Read] = {
    "DecodeService.Pair request": _reader(decode_pb2.PairRequest, _offer),
    "DecodeService.Pair response": _reader(decode_pb2.PairResponse, codec.decode_answer),
    "DecodeService.Reserve request": _reader(decode_pb2.ReserveRequest, codec.decode_reserve),
    "DecodeService.Reserve response": _reader(
        decode_pb2.ReserveResponse, lambda message: codec.decode_reservation(message.reservation)
    ),
    "DecodeService.Push request": codec.push_from_bytes,
    "DecodeService.Push response": _reader(decode_pb2.PushResponse, codec.decode_receipt),
    "DecodeService.Decode request": _reader(decode_pb2.DecodeRequest, codec.decode_decode_job),
    "DecodeService.Decode response": _reader(decode_pb2.DecodeResponse, codec.decode_decoded_tokens),
    "DecodeService.Generate request": _reader(decode_pb2.GenerateRequest, codec.decode_generate_job),
    "DecodeService.Generate response": _reader(decode_pb2.GenerateResponse, codec.decode_decoded_tokens),
    "PrefillService.Connect request": _reader(prefill_pb2.ConnectRequest, codec.decode_connect),
    "PrefillService.Connect response": _reader(prefill_pb2.ConnectResponse, codec.decode_paired),
    "PrefillService.Prefill request": _reader(prefill_pb2.PrefillRequest, codec.decode_prefill_job),
    "PrefillService.Prefill response": _reader(prefill_pb2.PrefillResponse, codec.decode_prefill_event),
    "WorkerService.Renew request": _reader(handoff_pb2.RenewRequest, _renewal),
    "WorkerService.Renew response": _reader(
        handoff_pb2.RenewResponse, lambda message: codec.decode_seconds(message.lease, "lease")
    ),
    "WorkerService.Release request": _reader(handoff_pb2.ReleaseRequest, _release),
    "WorkerService.Release response": _reader(
        handoff_pb2.ReleaseResponse, lambda message: codec.decode_state(message.previous_state)
    ),
    "WorkerService.GetVerdict request": _reader(handoff_pb2.GetVerdictRequest, _digests),
    "WorkerService.GetVerdict response": _reader(
        handoff_pb2.GetVerdictResponse, lambda message: codec.decode_verdict(message.verdict)
    ),
    "WorkerService.Describe request": _reader(handoff_pb2.DescribeRequest, lambda message: None),
    "WorkerService.Describe response": _reader(handoff_pb2.DescribeResponse, codec.decode_description),
    "WorkerService.Drain request": _reader(handoff_pb2.DrainRequest, lambda message: None),
    "WorkerService.Drain response": _reader(
        handoff_pb2.DrainResponse, lambda message: message.running_requests
    ),
    "CoordinatorService.Register request": _reader(coordinator_pb2.RegisterRequest, registration_of),
    "CoordinatorService.Register response": _reader(
        coordinator_pb2.RegisterResponse,
        lambda message: codec.decode_seconds(message.heartbeat_interval, "heartbeat_interval"),
    ),
    "CoordinatorService.Heartbeat request": _reader(coordinator_pb2.HeartbeatRequest, _heartbeat),
    "CoordinatorService.Heartbeat response": _reader(
        coordinator_pb2.HeartbeatResponse, lambda message: message.register_again
    ),
}
"""By rpc and direction: from bytes to what the project makes of them."""


def read_status(data: bytes) -> KvpactError:
    """The error of a status, which must be fit to be told on."""
    error = status_from_bytes(data)
    status_to_bytes(error)
    return error


def read_capture_bytes(data: bytes, folder: Path) -> object:
    """What `kvpact handoff` makes of a file."""
    path = folder / "hostile.kvpact"
    path.write_bytes(data)
    return read_capture(path)


def outcome(read: Read, data: bytes) -> str:
    """`read`, or the name of the KvpactError; any other exception comes out."""
    try:
        read(data)
    except KvpactError as error:
        return type(error).__name__
    return "read"


_INTEGERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_NUMBERS = (0.0, -0.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "\x00", "a\nb", "\u202e", "x" * 70_000, "unix:/tmp/x", "dns:///a:1", "%s%n{0}")
_BYTES = (b"", b"\x00", b"x" * 15, b"x" * 17, b"y" * 31, b"y" * 33, b"\xff" * 70_000)
_ENUMS = (0, 99, -1, 2**31 - 1)
MANY = 20_000
"""How often a repeated field is repeated at worst."""


def _extremes(field: FieldDescriptor) -> tuple[Any, ...]:
    kinds: dict[int, tuple[Any, ...]] = {
        FieldDescriptor.CPPTYPE_FLOAT: _NUMBERS,
        FieldDescriptor.CPPTYPE_DOUBLE: _NUMBERS,
        FieldDescriptor.CPPTYPE_BOOL: (True, False),
        FieldDescriptor.CPPTYPE_ENUM: _ENUMS,
    }
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS
    return kinds.get(field.cpp_type, _INTEGERS)


def _fits(message: Message, field: FieldDescriptor, value: Any) -> bool:
    """Sets the field; whether its type can hold the value."""
    try:
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    except ValueError:
        return False
    return True


def _changes(message: Message) -> Iterator[tuple[str, Callable[[Message], bool]]]:
    """Every change of one field, as an action on a copy; false where it can't be made."""
    for field in message.DESCRIPTOR.fields:
        yield f"{field.name} cleared", lambda copy, name=field.name: copy.ClearField(name) is None
        if field.message_type is None:
            for value in _extremes(field):
                yield (
                    f"{field.name} {str(value)[:20]!r}",
                    lambda copy, field=field, value=value: _fits(copy, field, value),
                )
        if field.is_repeated:
            yield f"{field.name} many", lambda copy, field=field: _multiply(copy, field)


def _multiply(message: Message, field: FieldDescriptor) -> bool:
    values = getattr(message, field.name)
    if not len(values):
        return False
    first = values[0]
    values.extend([first] * (MANY if field.message_type is None else 300))
    return True


def _places(message: Message, path: tuple[tuple[str, int | None], ...] = ()) -> Iterator[Any]:
    """This message and every one within, as ways to find it in a copy."""
    yield path
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.is_repeated:
            for index in range(min(len(value), 2)):
                yield from _places(value[index], (*path, (field.name, index)))
        else:
            yield from _places(value, (*path, (field.name, None)))


def _at(message: Message, path: Iterable[tuple[str, int | None]]) -> Message:
    for name, index in path:
        found = getattr(message, name)
        message = found if index is None else found[index]
    return message


def field_mutations(message: Message) -> Iterator[tuple[str, bytes]]:
    """Each field at each depth: cleared, at its extremes, repeated."""
    for path in _places(message):
        for label, change in _changes(_at(message, path)):
            copy = type(message)()
            copy.CopyFrom(message)
            if change(_at(copy, path)):
                where = ".".join(name for name, _ in path)
                yield f"{where} {label}".strip(), copy.SerializeToString()


def varint(value: int) -> bytes:
    """As protobuf writes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def byte_mutations(data: bytes, *, most: int = 400) -> Iterator[tuple[str, bytes]]:
    """Truncations, flipped bits, bytes doubled, unknown fields, lengths that claim what isn't there."""
    step = max(1, len(data) // most)
    for index in range(0, len(data), step):
        yield f"cut at {index}", data[:index]
        yield f"bit flipped at {index}", _flipped(data, index)
    yield "twice", data * 2
    yield "unknown field", data + b"\xfa\xff\x03\x03abc"
    yield "unknown group", data + b"\xfb\xff\x03" * 3
    for tag in range(1, 16):
        for size in (len(data), 2**31 - 1, 2**35, 2**40, 2**63 - 1):
            claim = varint(tag << 3 | 2) + varint(size)
            yield f"field {tag} claims {size}", claim + data[:64]
    yield "nested too deep", _nested(400)
    yield "varint without end", b"\xff" * 64
    yield "12 then nothing", b"\x12"


def _flipped(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :]


def _nested(depth: int) -> bytes:
    inner = b""
    for _ in range(depth):
        inner = b"\x0a" + varint(len(inner)) + inner
    return inner


def framing_mutations(chunk: bytes) -> Iterator[tuple[str, bytes]]:
    """A framed chunk whose own lengths lie: of the part, of the header, of the payload."""
    body = chunk[2:]
    header_end = 2 + body[1]
    for size in (0, 1, len(body) - 1, len(body) + 1, 2**31, 2**35 - 1):
        yield f"part claims {size}", b"\x12" + varint(size) + body
        for lie in (b"\x0a" + varint(size) + body[2:], body[:header_end] + b"\x11" + struct.pack("<Q", 1)):
            yield f"header claims {size}", b"\x12" + varint(len(lie)) + lie
        lie = body[: header_end + 9] + b"\x7a" + varint(size) + b"xy"
        yield f"payload claims {size}", b"\x12" + varint(len(lie)) + lie


def mutations(message: Message) -> Iterator[tuple[str, bytes]]:
    """All of them for one valid message."""
    data = message.SerializeToString()
    yield from field_mutations(message)
    yield from byte_mutations(data)
    if data[:1] == b"\x12":
        yield from islice(framing_mutations(data), 100)
