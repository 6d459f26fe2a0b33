"""Parts of a push from and to protobuf; chunks are framed by hand so that their payload is copied once.

The framing is protobuf's own: PushRequest.chunk (2); PushChunk.header (1), .checksum (2), .payload (15).
Any other valid encoding is read through the generated classes.
"""

from __future__ import annotations

import struct

from kvpact.errors import BadRequest, DataLoss
from kvpact.handoff import codec_fields as fields
from kvpact.handoff.canary_codec import decode_canary, encode_canary
from kvpact.handoff.codec_fields import join
from kvpact.handoff.messages import (
    Buffer,
    Chunk,
    ChunkHeader,
    Commit,
    CommitReceipt,
    Open,
    PushPart,
    Witness,
    WitnessReport,
)
from kvpact.handoff.transport_codec import decode_segment, encode_segment
from kvpact.handoff.verdict_codec import EXACTNESSES, decode_digest, decode_plan, encode_plan
from kvpact.handoff.worker_codec import decode_handoff_id
from kvpact.v1 import decode_pb2 as pb
from kvpact.v1 import handoff_pb2

CHUNK_TAG = b"\x12"
HEADER_TAG = b"\x0a"
CHECKSUM_TAG = b"\x11"
PAYLOAD_TAG = b"\x7a"


def push_to_bytes(part: PushPart) -> bytes:
    """Serialised PushRequest."""
    match part:
        case Chunk():
            return _chunk_to_bytes(part)
        case Open():
            opened = pb.PushOpen(
                handoff_id=part.handoff_id,
                generation=part.generation,
                contract_digest=part.contract_digest,
                shm=None if part.shm is None else encode_segment(part.shm),
            )
            return pb.PushRequest(open=opened).SerializeToString()
        case Commit():
            return pb.PushRequest(commit=_encode_commit(part)).SerializeToString()


def push_from_bytes(data: bytes) -> PushPart:
    """One part of a push; a chunk's keys and values are views into `data`.

    Raises:
        BadRequest: no part is set, or a field is unset.
        DataLoss: a payload isn't as long as its header says.
    """
    framed = _split_chunk(data)
    if framed is not None:
        return _chunk(*framed)
    message = fields.parse(pb.PushRequest, data, "push")
    match message.WhichOneof("part"):
        case "open":
            return _decode_open(message.open, "open")
        case "chunk":
            return _decode_chunk(message.chunk)
        case "commit":
            return _decode_commit(message.commit, "commit")
        case _:
            raise BadRequest("push.part is unset; expected open, chunk or commit", param="push.part")


def encode_receipt(receipt: CommitReceipt) -> pb.PushResponse:
    """Receipt of a commit as a message."""
    return pb.PushResponse(
        exactness=EXACTNESSES.encode(receipt.exactness),
        max_abs_error=receipt.max_abs_error,
        plan=encode_plan(receipt.plan),
        canary=None if receipt.canary is None else encode_canary(receipt.canary),
        witnesses=_encode_report(receipt.witnesses) if receipt.witnesses.row_count else None,
    )


def decode_receipt(message: pb.PushResponse) -> CommitReceipt:
    """Receipt of a commit from a message."""
    return CommitReceipt(
        exactness=EXACTNESSES.decode(message.exactness, "exactness"),
        max_abs_error=fields.optional_number(message, "max_abs_error", "", positive=False),
        plan=decode_plan(message.plan, "plan"),
        witnesses=WitnessReport(
            row_count=fields.integer(message.witnesses, "row_count", "witnesses", least=0),
            shows_rotation=message.witnesses.shows_rotation,
        ),
        canary=decode_canary(message.canary, "canary") if message.HasField("canary") else None,
    )


def _chunk_to_bytes(chunk: Chunk) -> bytes:
    if chunk.region_offset is not None:
        message = pb.PushChunk(
            header=_encode_header(chunk.header), checksum=chunk.checksum, region_offset=chunk.region_offset
        )
        return pb.PushRequest(chunk=message).SerializeToString()
    header = _encode_header(chunk.header).SerializeToString()
    payload_bytes = len(chunk.keys) + len(chunk.values)
    prefix = b"".join(
        (
            HEADER_TAG,
            _varint(len(header)),
            header,
            CHECKSUM_TAG,
            struct.pack("<Q", chunk.checksum),
            PAYLOAD_TAG,
            _varint(payload_bytes),
        )
    )
    return b"".join((CHUNK_TAG, _varint(len(prefix) + payload_bytes), prefix, chunk.keys, chunk.values))


def _split_chunk(data: bytes) -> tuple[handoff_pb2.ChunkHeader, int, memoryview] | None:
    """Header, checksum and payload of a chunk in the canonical framing; None for anything else."""
    if data[:1] != CHUNK_TAG:
        return None
    length, at = _read_varint(data, 1)
    if at + length != len(data) or data[at : at + 1] != HEADER_TAG:
        return None
    header_length, at = _read_varint(data, at + 1)
    header_bytes = data[at : at + header_length]
    at += header_length
    if data[at : at + 1] != CHECKSUM_TAG or data[at + 9 : at + 10] != PAYLOAD_TAG:
        return None
    checksum = int.from_bytes(data[at + 1 : at + 9], "little")
    payload_length, at = _read_varint(data, at + 10)
    if at + payload_length != len(data):
        return None
    header = fields.parse(handoff_pb2.ChunkHeader, header_bytes, "chunk.header")
    return header, checksum, memoryview(data)[at:]


def _decode_chunk(message: pb.PushChunk) -> Chunk:
    fields.part(message, "header", "chunk")
    if not message.HasField("region_offset"):
        return _chunk(message.header, message.checksum, memoryview(message.payload))
    if message.payload:
        raise BadRequest(
            "chunk.region_offset is set, and a payload as well; expected one of them",
            param="chunk.region_offset",
        )
    return Chunk(
        header=_decode_header(message.header, "chunk.header"),
        checksum=message.checksum,
        keys=b"",
        values=b"",
        region_offset=fields.integer(message, "region_offset", "chunk", least=0),
    )


def _chunk(message: handoff_pb2.ChunkHeader, checksum: int, payload: memoryview) -> Chunk:
    header = _decode_header(message, "chunk.header")
    if header.key_bytes + header.value_bytes != len(payload):
        raise DataLoss(
            f"{header} holds {len(payload)} bytes; its header says {header.key_bytes} of keys and "
            f"{header.value_bytes} of values",
            check="totals",
        )
    return Chunk(
        header=header, checksum=checksum, keys=payload[: header.key_bytes], values=payload[header.key_bytes :]
    )


def _encode_header(header: ChunkHeader) -> handoff_pb2.ChunkHeader:
    return handoff_pb2.ChunkHeader(
        handoff_id=header.handoff_id,
        generation=header.generation,
        sequence=header.sequence,
        layer=header.layer,
        block_start=header.block_start,
        block_count=header.block_count,
        key_bytes=header.key_bytes,
        value_bytes=header.value_bytes,
        key_scales=header.key_scales,
        value_scales=header.value_scales,
    )


def _decode_header(message: handoff_pb2.ChunkHeader, path: str) -> ChunkHeader:
    return ChunkHeader(
        handoff_id=decode_handoff_id(message.handoff_id, join(path, "handoff_id")),
        generation=fields.integer(message, "generation", path, least=1),
        sequence=fields.integer(message, "sequence", path, least=0),
        layer=fields.integer(message, "layer", path, least=0),
        block_start=fields.integer(message, "block_start", path, least=0),
        block_count=fields.integer(message, "block_count", path, least=1),
        key_bytes=fields.integer(message, "key_bytes", path, least=1),
        value_bytes=fields.integer(message, "value_bytes", path, least=0),
        key_scales=fields.numbers(message.key_scales, join(path, "key_scales"), positive=True),
        value_scales=fields.numbers(message.value_scales, join(path, "value_scales"), positive=True),
    )


def _decode_open(message: pb.PushOpen, path: str) -> Open:
    return Open(
        handoff_id=decode_handoff_id(message.handoff_id, join(path, "handoff_id")),
        generation=fields.integer(message, "generation", path, least=1),
        contract_digest=decode_digest(message.contract_digest, join(path, "contract_digest")),
        shm=decode_segment(message.shm, join(path, "shm")) if message.HasField("shm") else None,
    )


def _encode_commit(commit: Commit) -> pb.PushCommit:
    return pb.PushCommit(
        chunk_count=commit.chunk_count,
        payload_bytes=commit.payload_bytes,
        first_token_id=commit.first_token_id,
        first_token_logprob=commit.first_token_logprob,
        witnesses=[_encode_witness(witness) for witness in commit.witnesses],
        first_computed_tokens=commit.first_computed_tokens,
    )


def _decode_commit(message: pb.PushCommit, path: str) -> Commit:
    return Commit(
        chunk_count=fields.integer(message, "chunk_count", path, least=0),
        payload_bytes=fields.integer(message, "payload_bytes", path, least=0),
        first_token_id=fields.integer(message, "first_token_id", path, least=0),
        first_token_logprob=fields.optional_number(message, "first_token_logprob", path, positive=False),
        witnesses=tuple(
            _decode_witness(witness, f"{path}.witnesses[{index}]")
            for index, witness in enumerate(message.witnesses)
        ),
        first_computed_tokens=fields.integer(message, "first_computed_tokens", path, least=0),
    )


def _encode_report(report: WitnessReport) -> pb.WitnessReport:
    return pb.WitnessReport(row_count=report.row_count, shows_rotation=report.shows_rotation)


def _encode_witness(witness: Witness) -> handoff_pb2.Witness:
    return handoff_pb2.Witness(
        layer=witness.layer,
        position=witness.position,
        raw_key=witness.raw_key,
        attended_key=witness.attended_key,
        value=witness.value,
    )


def _decode_witness(message: handoff_pb2.Witness, path: str) -> Witness:
    return Witness(
        layer=fields.integer(message, "layer", path, least=0),
        position=fields.integer(message, "position", path, least=0),
        raw_key=message.raw_key,
        attended_key=message.attended_key,
        value=message.value,
    )


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """Value at `at` and the place behind it; (-1, at) where the bytes end or run on for more than 5."""
    value = 0
    for index, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return -1, at
