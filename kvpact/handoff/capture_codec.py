"""Records of a capture from and to the messages of the wire: a kind, and the message that travelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from kvpact.errors import BadRequest, KvpactError
from kvpact.handoff import codec
from kvpact.handoff import codec_fields as fields
from kvpact.handoff.capture import Capture, Reserved
from kvpact.handoff.messages import CommitReceipt, PairAnswer, PairOffer, PushPart
from kvpact.handoff.status import status_from_bytes, status_to_bytes
from kvpact.v1 import decode_pb2

T = TypeVar("T")


class RecordKind(IntEnum):
    """What a record holds; the number is its first byte. 0 ends the file."""

    PAIR_REQUEST = 1
    PAIR_RESPONSE = 2
    RESERVE_REQUEST = 3
    RESERVE_RESPONSE = 4
    PUSH_REQUEST = 5
    PUSH_RESPONSE = 6
    STATUS = 7
    """google.rpc.Status with which Reserve or Push failed."""


class Record(NamedTuple):
    """One message that travelled."""

    kind: RecordKind
    data: bytes


_ONLY_AFTER: dict[RecordKind, frozenset[RecordKind | None]] = {
    RecordKind.PAIR_REQUEST: frozenset({None}),
    RecordKind.PAIR_RESPONSE: frozenset({RecordKind.PAIR_REQUEST}),
    RecordKind.RESERVE_REQUEST: frozenset({RecordKind.PAIR_RESPONSE}),
    RecordKind.RESERVE_RESPONSE: frozenset({RecordKind.RESERVE_REQUEST}),
    RecordKind.PUSH_REQUEST: frozenset({RecordKind.RESERVE_RESPONSE, RecordKind.PUSH_REQUEST}),
    RecordKind.PUSH_RESPONSE: frozenset({RecordKind.PUSH_REQUEST}),
    RecordKind.STATUS: frozenset(
        {RecordKind.RESERVE_REQUEST, RecordKind.RESERVE_RESPONSE, RecordKind.PUSH_REQUEST}
    ),
}
_MAY_END_AFTER = frozenset({RecordKind.PAIR_RESPONSE, RecordKind.PUSH_RESPONSE, RecordKind.STATUS})


def encode_capture(capture: Capture) -> Iterator[Record]:
    """Records in order; the same capture gives the same bytes."""
    yield from pair_records(capture.offer, capture.answer)
    if capture.reserved is not None:
        yield from reserve_records(capture.reserved)
    for part in capture.parts:
        yield push_record(part)
    if capture.receipt is not None:
        yield receipt_record(capture.receipt)
    if capture.error is not None:
        yield error_record(capture.error)


def pair_records(offer: PairOffer, answer: PairAnswer) -> tuple[Record, Record]:
    """What was offered and what the reader said."""
    return (
        Record(RecordKind.PAIR_REQUEST, _bytes_of(codec.encode_offer(offer))),
        Record(RecordKind.PAIR_RESPONSE, _bytes_of(codec.encode_answer(answer))),
    )


def reserve_records(asked: Reserved) -> tuple[Record, ...]:
    """What was asked for, and the grant where there was one."""
    request = codec.encode_reserve(asked.terms, asked.max_output_tokens)
    record = Record(RecordKind.RESERVE_REQUEST, _bytes_of(request))
    if asked.reservation is None:
        return (record,)
    granted = decode_pb2.ReserveResponse(reservation=codec.encode_reservation(asked.reservation))
    return record, Record(RecordKind.RESERVE_RESPONSE, _bytes_of(granted))


def push_record(part: PushPart) -> Record:
    """One part of a push; the bytes of a chunk are copied."""
    return Record(RecordKind.PUSH_REQUEST, codec.push_to_bytes(part))


def receipt_record(receipt: CommitReceipt) -> Record:
    """The end of a handoff that was committed."""
    return Record(RecordKind.PUSH_RESPONSE, _bytes_of(codec.encode_receipt(receipt)))


def error_record(error: KvpactError) -> Record:
    """The end of a handoff that failed."""
    return Record(RecordKind.STATUS, status_to_bytes(error))


def decode_capture(records: Iterable[Record]) -> Capture:
    """The capture that the records tell.

    Raises:
        BadRequest, DataLoss: a record is out of order, a message is malformed, or the end is missing.
    """
    found: dict[RecordKind, bytes] = {}
    parts: list[PushPart] = []
    last: RecordKind | None = None
    for kind, data in records:
        if last not in _ONLY_AFTER[kind]:
            raise _out_of_order(kind.name, last)
        if kind is RecordKind.PUSH_REQUEST:
            parts.append(codec.push_from_bytes(data))
        found[kind] = data
        last = kind
    if last not in _MAY_END_AFTER:
        raise _out_of_order("END", last)
    offer = fields.parse(decode_pb2.PairRequest, found[RecordKind.PAIR_REQUEST], "pair_request")
    answer = fields.parse(decode_pb2.PairResponse, found[RecordKind.PAIR_RESPONSE], "pair_response")
    return Capture(
        offer=codec.decode_offer(offer),
        answer=codec.decode_answer(answer),
        reserved=_reserved(found),
        parts=tuple(parts),
        receipt=_optional(found, RecordKind.PUSH_RESPONSE, _receipt),
        error=_optional(found, RecordKind.STATUS, _error),
    )


def _reserved(found: dict[RecordKind, bytes]) -> Reserved | None:
    data = found.get(RecordKind.RESERVE_REQUEST)
    if data is None:
        return None
    request = fields.parse(decode_pb2.ReserveRequest, data, "reserve_request")
    terms, max_output_tokens = codec.decode_reserve(request)
    asked = Reserved(terms=terms, max_output_tokens=max_output_tokens, reservation=None)
    granted = found.get(RecordKind.RESERVE_RESPONSE)
    if granted is None:
        return asked
    response = fields.parse(decode_pb2.ReserveResponse, granted, "reserve_response")
    where = fields.part(response, "reservation", "reserve_response")
    return replace(asked, reservation=codec.decode_reservation(response.reservation, where))


def _receipt(data: bytes) -> CommitReceipt:
    return codec.decode_receipt(fields.parse(decode_pb2.PushResponse, data, "push_response"))


def _error(data: bytes) -> KvpactError:
    return status_from_bytes(data)


def _optional(found: dict[RecordKind, bytes], kind: RecordKind, decode: Callable[[bytes], T]) -> T | None:
    data = found.get(kind)
    return None if data is None else decode(data)


def _out_of_order(what: str, last: RecordKind | None) -> BadRequest:
    return fields.refusal("record", f"{what} came after {'nothing' if last is None else last.name}")


def _bytes_of(message: Message) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
