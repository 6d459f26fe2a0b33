"""The `.kvpact` file: magic, version, records as kind, length and message, and an end that proves it whole.

    magic       8 bytes  89 4B 56 50 41 43 54 0A
    version     u32      1
    record*     kind u8 (1 to 7), length u32, message
    end         kind u8 (0), length u32 (12), record count u32, xxh3_64 u64 of all bytes before this record

Numbers are little-endian. Nothing is allocated for a length that the cap or the file's size doesn't allow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from kvpact.errors import BadRequest, DataLoss, UnreadableSource
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_codec import Record, RecordKind, decode_capture, encode_capture

SUFFIX = ".kvpact"
MAGIC = b"\x89KVPACT\n"
VERSION = 1
RECORDS_CAP = 1 << 20
"""Most records of one file."""
RECORD_CAP_BYTES = 5 << 20
"""Most bytes of one record: a chunk of a region takes 4 MiB and its header."""
_VERSION = struct.Struct("<I")
_PREFIX = struct.Struct("<BI")
_END = struct.Struct("<IQ")
_END_KIND = 0


class Framing:
    """Bytes of one file in order: `head`, each `record`, `end`."""

    head = MAGIC + _VERSION.pack(VERSION)

    def __init__(self) -> None:
        self._seen = xxhash.xxh3_64(self.head)
        self._count = 0

    def record(self, record: Record) -> tuple[bytes, bytes]:
        """Prefix and message of the next record."""
        assert len(record.data) <= RECORD_CAP_BYTES, "a message is within its transport's own limit"
        prefix = _PREFIX.pack(record.kind, len(record.data))
        self._seen.update(prefix)
        self._seen.update(record.data)
        self._count += 1
        return prefix, record.data

    def end(self) -> bytes:
        """What proves the file whole."""
        end = _END.pack(self._count, self._seen.intdigest())
        return _PREFIX.pack(_END_KIND, len(end)) + end


def capture_to_bytes(capture: Capture) -> bytes:
    """The whole file of a capture; the same capture gives the same bytes."""
    framing = Framing()
    out = [framing.head]
    for record in encode_capture(capture):
        out += framing.record(record)
    return b"".join((*out, framing.end()))


def write_capture(path: Path, capture: Capture) -> None:
    """Writes a file, over one that may be there. Raises UnreadableSource where that can't be done."""
    try:
        path.write_bytes(capture_to_bytes(capture))
    except OSError as error:
        raise UnreadableSource(f"can't write {path}: {error.strerror}", source=str(path)) from error


def read_capture(path: Path) -> Capture:
    """The capture in a file.

    Raises:
        UnreadableSource: no such file, another form or version, truncated, damaged, out of order, a contract
            that is none; says which.
    """
    try:
        with path.open("rb") as stream:
            capture = decode_capture(list(_records(stream, path)))
        capture.writer_contract()
        return capture
    except OSError as error:
        raise UnreadableSource(f"can't read {path}: {error.strerror}", source=str(path)) from error
    except (BadRequest, DataLoss) as error:
        raise UnreadableSource(f"{path}: {error}", source=str(path)) from error


def _records(stream: BinaryIO, path: Path) -> Iterator[Record]:
    size = os.fstat(stream.fileno()).st_size
    seen = xxhash.xxh3_64()
    head = _take(stream, len(MAGIC) + _VERSION.size, size, path, "header")
    if not head.startswith(MAGIC):
        raise _unreadable(path, "not a .kvpact file: it begins with other bytes")
    (version,) = _VERSION.unpack(head[len(MAGIC) :])
    if version != VERSION:
        raise _unreadable(path, f"version is {version}; this release reads version {VERSION}")
    seen.update(head)
    for count in range(RECORDS_CAP + 1):
        prefix = _take(stream, _PREFIX.size, size, path, f"record {count}")
        kind, length = _PREFIX.unpack(prefix)
        if kind == _END_KIND:
            _check_end(_take(stream, length, size, path, "end"), count, seen.intdigest(), path)
            if stream.tell() != size:
                raise _unreadable(path, f"{size - stream.tell()} bytes lie behind its end")
            return
        data = _take(stream, length, size, path, f"record {count}")
        seen.update(prefix)
        seen.update(data)
        yield Record(_kind(kind, count, path), data)
    raise _unreadable(path, f"holds more than {RECORDS_CAP} records")


def _take(stream: BinaryIO, length: int, size: int, path: Path, what: str) -> bytes:
    """The next `length` bytes, refused before they are read where there can't be that many."""
    if length > RECORD_CAP_BYTES:
        raise _unreadable(path, f"{what}: length is {length} bytes; the cap is {RECORD_CAP_BYTES}")
    left = size - stream.tell()
    if length > left:
        raise _unreadable(path, f"truncated: {what} takes {length} bytes, {left} are left")
    return stream.read(length)


def _kind(number: int, index: int, path: Path) -> RecordKind:
    try:
        return RecordKind(number)
    except ValueError as error:
        raise _unreadable(path, f"record {index} is of unknown kind {number}") from error


def _check_end(data: bytes, count: int, checksum: int, path: Path) -> None:
    if len(data) != _END.size:
        raise _unreadable(path, f"end takes {len(data)} bytes; expected {_END.size}")
    if _END.unpack(data) != (count, checksum):
        raise _unreadable(path, "damaged: count or checksum of its records isn't what its end says")


def _unreadable(path: Path, problem: str) -> UnreadableSource:
    return UnreadableSource(f"{path}: {problem}", source=str(path))
