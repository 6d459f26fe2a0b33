"""A capture file gives back what was recorded, and is refused by name when it isn't whole."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kvpact.contract.identity import contract_digest
from kvpact.errors import DataLoss, UnreadableSource
from kvpact.handoff.capture import Capture, Reserved
from kvpact.handoff.capture_codec import Record, RecordKind, decode_capture, encode_capture
from kvpact.handoff.capture_file import MAGIC, RECORD_CAP_BYTES, capture_to_bytes, read_capture, write_capture
from kvpact.handoff.messages import CommitReceipt, Open
from kvpact.types import Exactness
from tests.factories import make_contract
from tests.handoff_samples import SAMPLES, full_chunk

HEADER_BYTES = len(MAGIC) + 4
END_BYTES = 5 + 12


def full_capture() -> Capture:
    """Every record kind but STATUS."""
    chunk = full_chunk()
    opened = Open(
        handoff_id=chunk.header.handoff_id, generation=3, contract_digest=contract_digest(make_contract())
    )
    return Capture(
        offer=SAMPLES["offer"].value,
        answer=SAMPLES["answer"].value,
        reserved=Reserved(
            terms=SAMPLES["terms"].value, max_output_tokens=8, reservation=SAMPLES["reservation"].value
        ),
        parts=(opened, chunk, SAMPLES["commit"].value),
        receipt=CommitReceipt(exactness=Exactness.BIT_EXACT, max_abs_error=None, plan=()),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "whole.kvpact"
    write_capture(path, full_capture())
    return path


def test_a_capture_comes_back_as_it_was(file: Path) -> None:
    assert read_capture(file) == full_capture()


def test_the_same_capture_gives_the_same_bytes(file: Path) -> None:
    assert capture_to_bytes(read_capture(file)) == file.read_bytes()


def test_a_failed_push_keeps_its_error(tmp_path: Path) -> None:
    failed = replace(
        full_capture(), receipt=None, error=DataLoss("chunk 0: checksum is another", check="checksum")
    )
    write_capture(tmp_path / "failed.kvpact", failed)
    error = read_capture(tmp_path / "failed.kvpact").error
    assert isinstance(error, DataLoss)
    assert (error.check, str(error)) == ("checksum", "chunk 0: checksum is another")


def test_a_refused_pair_is_a_whole_capture(tmp_path: Path) -> None:
    capture = full_capture()
    refused = Capture(offer=capture.offer, answer=capture.answer)
    write_capture(tmp_path / "refused.kvpact", refused)
    assert read_capture(tmp_path / "refused.kvpact") == refused


def test_a_truncation_is_refused_wherever_it_is(file: Path) -> None:
    data = file.read_bytes()
    for length in {*range(0, len(data), 17), *range(len(data) - 20, len(data))}:
        file.write_bytes(data[:length])
        with pytest.raises(UnreadableSource, match=r"truncated|begins with other bytes"):
            read_capture(file)


def test_a_flipped_bit_is_refused_wherever_it_is(file: Path) -> None:
    data = file.read_bytes()
    for index in range(0, len(data), 17):
        file.write_bytes(data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :])
        with pytest.raises(UnreadableSource):
            read_capture(file)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"GGUF" + data[4:], "not a .kvpact file"),
        (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "version is 2"),
        (lambda data: data + b"\0", "1 bytes lie behind its end"),
        (lambda data: data[:HEADER_BYTES] + b"\x63" + data[HEADER_BYTES + 1 :], "unknown kind 99"),
        (lambda data: data[:-END_BYTES] + struct.pack("<BI", 0, 3) + b"abc", "end takes 3 bytes"),
    ],
    ids=["magic", "version", "more", "kind", "end"],
)
def test_another_form_is_refused_by_name(file: Path, change: object, problem: str) -> None:
    assert callable(change)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UnreadableSource, match=problem):
        read_capture(file)


@pytest.mark.parametrize("length", [RECORD_CAP_BYTES + 1, 2**32 - 1])
def test_an_oversize_length_is_refused_before_it_is_read(file: Path, length: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: HEADER_BYTES + 1] + struct.pack("<I", length) + data[HEADER_BYTES + 5 :])
    with pytest.raises(UnreadableSource, match=f"length is {length} bytes; the cap is {RECORD_CAP_BYTES}"):
        read_capture(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match=r"none\.kvpact"):
        read_capture(tmp_path / "none.kvpact")


@pytest.mark.parametrize("left_out", list(RecordKind)[:5], ids=lambda kind: kind.name)
def test_records_out_of_order_are_refused(left_out: RecordKind) -> None:
    records = [record for record in encode_capture(full_capture()) if record.kind is not left_out]
    with pytest.raises(Exception, match="came after"):
        decode_capture(records)


def test_a_capture_without_an_end_is_refused() -> None:
    records = [record for record in encode_capture(full_capture()) if record.kind < RecordKind.PUSH_RESPONSE]
    with pytest.raises(Exception, match="END came after PUSH_REQUEST"):
        decode_capture(records)


def test_a_malformed_message_is_refused(tmp_path: Path) -> None:
    records = list(encode_capture(full_capture()))
    records[1] = Record(RecordKind.PAIR_RESPONSE, b"\xff")
    with pytest.raises(Exception, match="pair_response"):
        decode_capture(records)
