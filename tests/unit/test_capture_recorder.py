"""The recorder passes everything on and keeps each handoff as it went over the port."""

from __future__ import annotations

import pytest

from kvpact.errors import ContractRefused, DataLoss, Exhausted
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import capture_to_bytes
from kvpact.handoff.capture_recorder import RecordingReaderPort
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.messages import Chunk, Open
from kvpact.types import VerdictWord
from tests.factories import make_contract
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    first_token,
    in_process_wire,
    make_reader,
    progress,
)


def recording(wire: Wire) -> tuple[RecordingReaderPort, list[Capture]]:
    captures: list[Capture] = []
    return RecordingReaderPort(InProcessReaderPort(wire.reader.receiver), captures.append), captures


async def test_a_handoff_is_kept_from_offer_to_receipt() -> None:
    async with in_process_wire() as wire:
        port, captures = recording(wire)
        sender, terms = wire.sender(port), wire.terms(prompt_tokens=40)
        await sender.pair(READER)
        sent = await sender.hand_over(
            terms, MAX_OUTPUT_TOKENS, progress(16, 40), FakeCache(wire.contract), first_token()
        )
        await port.close()
    (capture,) = captures
    assert capture.receipt == sent.receipt
    assert capture.error is None
    assert capture.reserved is not None
    assert capture.reserved.terms == terms
    assert capture.reserved.max_output_tokens == MAX_OUTPUT_TOKENS
    assert capture.writer_contract() == wire.contract
    assert isinstance(capture.parts[0], Open)
    assert len(capture.chunks()) == sent.chunk_count
    commit = capture.commit()
    assert commit is not None
    assert commit.first_token_id == FIRST_TOKEN_ID


async def test_chunks_are_copied_since_their_buffers_belong_to_the_writer() -> None:
    async with in_process_wire() as wire:
        port, captures = recording(wire)
        sender = wire.sender(port)
        await sender.pair(READER)
        cache = FakeCache(wire.contract)
        await sender.hand_over(wire.terms(), MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
    (capture,) = captures
    assert all(isinstance(part.keys, bytes) for part in capture.parts if isinstance(part, Chunk))
    chunk = capture.chunks()[0]
    assert bytes(chunk.keys).startswith(cache.block(chunk.header.layer, chunk.header.block_start)[0])


async def test_a_refused_pair_is_given_out_at_once() -> None:
    async with in_process_wire(contract=make_contract(theta=500.0)) as wire:
        port, captures = recording(wire)
        await wire.sender(port).pair(READER)
        assert [capture.answer.verdict.word for capture in captures] == [VerdictWord.REJECT]
        with pytest.raises(ContractRefused):
            await port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    assert isinstance(captures[1].error, ContractRefused)


async def test_a_refused_reservation_keeps_what_was_asked() -> None:
    async with in_process_wire(reader=make_reader(blocks=4)) as wire:
        port, captures = recording(wire)
        await wire.sender(port).pair(READER)
        await port.reserve(wire.terms(prompt_tokens=60, number=2), 1)
        with pytest.raises(Exhausted):
            await port.reserve(wire.terms(), 1)
    (capture,) = captures
    assert capture.reserved is not None
    assert capture.reserved.reservation is None
    assert isinstance(capture.error, Exhausted)


async def test_a_failed_push_keeps_its_parts_and_its_error() -> None:
    async with in_process_wire() as wire:
        port, captures = recording(wire)
        wire.reader.landing.failure = DataLoss("not what was said", check="checksum")
        sender = wire.sender(port)
        await sender.pair(READER)
        with pytest.raises(DataLoss):
            await sender.hand_over(
                wire.terms(), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
            )
    (capture,) = captures
    assert isinstance(capture.error, DataLoss)
    assert capture.receipt is None
    assert capture_to_bytes(capture)


async def test_a_handoff_that_was_given_up_is_not_kept() -> None:
    async with in_process_wire() as wire:
        port, captures = recording(wire)
        await wire.sender(port).pair(READER)
        terms = wire.terms()
        await port.reserve(terms, MAX_OUTPUT_TOKENS)
        await port.release(terms.handoff_id, "no longer wanted")
    assert captures == []
