"""A capturing reader answers as one that doesn't capture, and leaves one whole file for each handoff."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpact.clock import wall_time_ms
from kvpact.config import HandoffConfig, load_config, parse_config
from kvpact.contract.compare import Policy
from kvpact.errors import BadRequest, ContractRefused, DataLoss, Exhausted, Fenced, Unavailable
from kvpact.handoff import capture_writer
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.capture_folder import CaptureBounds, CaptureFolder
from kvpact.handoff.capture_port import CapturingReaderPort, capturing
from kvpact.handoff.capture_writer import CaptureWriter
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.messages import Chunk, Open, PushPart
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.trust import TakenOnTrust
from kvpact.types import VerdictWord
from tests.factories import make_contract
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    Wire,
    all_parts,
    in_process_wire,
    make_reader,
    stream,
)


class Captured:
    """A wire whose reader captures to a folder."""

    def __init__(self, wire: Wire, folder: Path, writer: CaptureWriter) -> None:
        self.wire = replace(wire, port=CapturingReaderPort(wire.reader.receiver, writer))
        self.folder = folder
        self.writer = writer

    async def pushed(self, parts: list[PushPart]) -> object:
        return await self.wire.port.push(stream(parts))

    def files(self) -> list[Capture]:
        """Everything written, the oldest first; nothing more is captured."""
        self.writer.close()
        assert not list(self.folder.glob(".*"))
        return [read_capture(path) for path in sorted(self.folder.iterdir())]


@asynccontextmanager
async def captured(folder: Path, wire: Wire) -> AsyncIterator[Captured]:
    bounds = CaptureBounds()
    yield (made := Captured(wire, folder, CaptureWriter(CaptureFolder(folder, bounds), now_ms=wall_time_ms)))
    made.writer.close()


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Captured]:
    async with in_process_wire() as wire, captured(tmp_path / "decode-0", wire) as made:
        await made.wire.sender().pair(READER)
        yield made


async def test_a_committed_handoff_is_written_from_offer_to_receipt(reader: Captured) -> None:
    terms = reader.wire.terms()
    parts = await all_parts(reader.wire, terms)
    receipt = await reader.pushed(parts)
    (capture,) = reader.files()
    assert capture.receipt == receipt
    assert capture.reserved is not None
    assert (capture.reserved.terms, capture.reserved.max_output_tokens) == (terms, MAX_OUTPUT_TOKENS)
    assert list(capture.parts) == parts
    assert reader.writer.written == 1


class BufferRegion:
    """A region over bytes of this process."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def check(self, offset: int, size_bytes: int) -> None:
        """See Region."""
        if offset + size_bytes > len(self._data):
            raise BadRequest("beyond the region", param="chunk.region_offset")

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """See Region."""
        return memoryview(self._data)[offset : offset + size_bytes]

    def close(self, *, reusable: bool) -> None:
        """See Region."""


class BufferTransports(ReaderTransports):
    """Every push opens `region`."""

    region: BufferRegion

    def open(self, *args: object) -> BufferRegion:
        """See ReaderTransports."""
        return self.region


def in_region(parts: list[PushPart]) -> tuple[list[PushPart], BufferRegion]:
    """The same push with its payload beside the messages."""
    data, told = b"", []
    for part in parts:
        kept = part
        if isinstance(part, Chunk):
            kept = replace(part, keys=b"", values=b"", region_offset=len(data))
            data += bytes(part.keys) + bytes(part.values)
        told.append(kept)
    return told, BufferRegion(data)


@asynccontextmanager
async def region_reader(folder: Path) -> AsyncIterator[tuple[Captured, BufferTransports]]:
    reader, transports = make_reader(), BufferTransports()
    clock, pool = reader.clock, reader.pool
    reader.receiver = Receiver(
        life=READER,
        contract=reader.contract,
        policy=Policy(),
        pool=pool,
        landing=reader.landing,
        verifier=TakenOnTrust(),
        judge=None,
        clock=clock,
        limits=ReceiverLimits(growth_watermark_blocks=0, reuse_prefixes=False),
        call_later=reader.alarms.call_later,
        transports=transports,
    )
    async with in_process_wire(reader=reader) as wire, captured(folder, wire) as made:
        await made.wire.sender().pair(READER)
        yield made, transports


async def test_a_payload_beside_the_messages_is_written_as_grpc_would_carry_it(tmp_path: Path) -> None:
    async with region_reader(tmp_path / "decode-0") as (reader, transports):
        parts = await all_parts(reader.wire, reader.wire.terms())
        told, transports.region = in_region(parts)
        receipt = await reader.pushed(told)
        (capture,) = reader.files()
    assert list(capture.parts) == parts
    assert capture.receipt == receipt


async def test_a_payload_that_lies_nowhere_ends_the_record_and_the_refusal_is_kept(tmp_path: Path) -> None:
    async with region_reader(tmp_path / "decode-0") as (reader, transports):
        parts = await all_parts(reader.wire, reader.wire.terms())
        told, transports.region = in_region(parts)
        beyond = told[2]
        assert isinstance(beyond, Chunk)
        told[2] = replace(beyond, region_offset=1 << 40)
        with pytest.raises(BadRequest):
            await reader.pushed(told)
        (capture,) = reader.files()
    assert list(capture.parts) == parts[:2]
    assert isinstance(capture.error, BadRequest)


async def test_a_failed_handoff_ends_with_its_error(reader: Captured) -> None:
    parts = await all_parts(reader.wire, reader.wire.terms())
    chunk = parts[1]
    assert isinstance(chunk, Chunk)
    parts[1] = replace(chunk, checksum=chunk.checksum ^ 1)
    with pytest.raises(DataLoss):
        await reader.pushed(parts)
    (capture,) = reader.files()
    assert isinstance(capture.error, DataLoss)
    assert capture.error.check == "checksum"
    assert capture.parts[1] == parts[1]


async def test_a_push_that_its_writer_breaks_off_ends_with_unavailable(reader: Captured) -> None:
    parts = await all_parts(reader.wire, reader.wire.terms())
    reached = asyncio.Event()

    async def stalled() -> AsyncIterator[PushPart]:
        for part in parts[:2]:
            yield part
        reached.set()
        await asyncio.Event().wait()

    push = asyncio.ensure_future(reader.wire.port.push(stalled()))
    await reached.wait()
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    (capture,) = reader.files()
    assert isinstance(capture.error, Unavailable)
    assert list(capture.parts) == parts[:2]


async def test_a_refused_reservation_is_written_with_what_was_asked(tmp_path: Path) -> None:
    async with (
        in_process_wire(reader=make_reader(blocks=4)) as wire,
        captured(tmp_path / "decode-0", wire) as reader,
    ):
        await reader.wire.sender().pair(READER)
        await reader.wire.port.reserve(wire.terms(prompt_tokens=60, number=2), 1)
        with pytest.raises(Exhausted):
            await reader.wire.port.reserve(wire.terms(), 1)
        (capture,) = reader.files()
    assert isinstance(capture.error, Exhausted)
    assert capture.reserved is not None
    assert capture.reserved.reservation is None


async def test_a_refused_pair_is_written_once_however_often_it_is_offered(tmp_path: Path) -> None:
    other = make_contract(theta=500.0)
    async with in_process_wire(contract=other) as wire, captured(tmp_path / "decode-0", wire) as reader:
        for _ in range(3):
            await reader.wire.sender().pair(READER)
        with pytest.raises(ContractRefused):
            await reader.wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
        pair, reservation = reader.files()
    assert pair.answer.verdict.word is VerdictWord.REJECT
    assert pair.reserved is None
    assert isinstance(reservation.error, ContractRefused)


async def test_a_stranger_s_push_is_written_and_so_is_the_writer_s_own_behind_it(reader: Captured) -> None:
    parts = await all_parts(reader.wire, reader.wire.terms())
    opened = parts[0]
    assert isinstance(opened, Open)
    with pytest.raises(Fenced):
        await reader.pushed([replace(opened, generation=99), *parts[1:]])
    await reader.pushed(parts)
    stranger, own = reader.files()
    assert isinstance(stranger.error, Fenced)
    assert own.receipt is not None


async def test_a_handoff_that_was_given_up_makes_no_file(reader: Captured) -> None:
    terms = reader.wire.terms()
    await reader.wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
    await reader.wire.port.release(terms.handoff_id, "no longer wanted")
    assert reader.files() == []


async def test_a_folder_that_cannot_be_written_fails_no_handoff_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    async with in_process_wire() as wire, captured(tmp_path / "file" / "decode-0", wire) as reader:
        await reader.wire.sender().pair(READER)
        for number in (1, 2, 3):
            assert await reader.pushed(await all_parts(reader.wire, wire.terms(number=number)))
        with caplog.at_level(logging.WARNING):
            reader.writer.close()
        assert (reader.writer.written, reader.writer.lost) == (0, 3)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "isn't captured" in caplog.records[0].message


async def test_a_full_disk_fails_no_handoff_and_the_next_is_written_when_there_is_room(
    reader: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("kvpact.handoff.capture_folder.os.write", _disk_full)
        assert await reader.pushed(await all_parts(reader.wire, reader.wire.terms()))
        await asyncio.to_thread(reader.writer._thread.submit(lambda: None).result)
    await reader.pushed(await all_parts(reader.wire, reader.wire.terms(number=2)))
    assert len(reader.files()) == 1
    assert (reader.writer.written, reader.writer.lost) == (1, 1)


def _disk_full(stream: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


async def test_a_disk_that_cannot_follow_costs_the_capture_and_no_memory(
    reader: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_writer, "QUEUE_CAP_BYTES", 3000)
    assert await reader.pushed(await all_parts(reader.wire, reader.wire.terms()))
    assert reader.files() == []
    assert reader.writer.lost == 1


async def test_a_push_that_ends_after_the_worker_stopped_ends_as_it_would(reader: Captured) -> None:
    parts = await all_parts(reader.wire, reader.wire.terms())
    reader.writer.close()
    assert await reader.pushed(parts)
    assert reader.files() == []


async def test_a_deployment_that_asks_for_no_capture_gets_none() -> None:
    async with in_process_wire() as wire:
        assert capturing(wire.reader.receiver, HandoffConfig(), "decode-0") is None


async def test_what_is_written_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with in_process_wire() as wire:
        port = capturing(wire.reader.receiver, HandoffConfig(capture=tmp_path), "decode/../0")
        assert port is not None
        await port.close()
    assert f"{tmp_path}/decode____0, prompts included" in caplog.text
    assert (tmp_path / "decode____0").is_dir()


def test_a_relative_folder_is_that_of_the_command_in_every_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, {"handoff": {"capture": Path("captures")}})
    monkeypatch.chdir("/")
    elsewhere = parse_config(config.model_dump(mode="json"))
    assert elsewhere.handoff.capture == config.handoff.capture == tmp_path / "captures"
