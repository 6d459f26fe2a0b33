"""Payloads beside the messages: bytes that change, offsets that lie, regions of another handoff."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from kvpact.errors import BadRequest, DataLoss, Exhausted, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.messages import Chunk, HandoffTerms, Open, PushPart, Reservation
from kvpact.handoff.nixl_staging import Staging
from kvpact.handoff.shm_segment import SUPPORTED, OwnSegment
from kvpact.handoff.transport_choice import ALWAYS_GRPC
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.v1 import decode_pb2
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    all_parts,
    expected_blocks,
    first_token,
    grpc_wire,
    in_process_wire,
    order_of,
    progress,
    stream,
)
from tests.region_wires import (
    LoopbackAgent,
    loopback_wire,
    nixl_wire,
    shm_in_process_wire,
    shm_wire,
    with_transports,
)

MakeWire = Callable[[], AbstractAsyncContextManager[Wire]]
REGION_WIRES: dict[str, MakeWire] = {
    "shm": shm_wire,
    "shm_in_process": shm_in_process_wire,
    "nixl_loopback": loopback_wire,
}


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=REGION_WIRES)
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    async with REGION_WIRES[request.param]() as wire:
        await wire.sender().pair(READER)
        yield wire


@pytest.fixture
async def shm() -> AsyncIterator[Wire]:
    async with shm_wire() as wire:
        await wire.sender().pair(READER)
        yield wire


def chunk_of(parts: list[PushPart]) -> Chunk:
    chunk = parts[1]
    assert isinstance(chunk, Chunk)
    return chunk


def flip(wire: Wire, parts: list[PushPart]) -> None:
    """Changes a byte of the first chunk where the reader will look for it."""
    staging = wire.reader.receiver._transports._staging
    chunk = chunk_of(parts)
    if staging is None:
        assert isinstance(chunk.values, memoryview)
        chunk.values[3] ^= 1
        return
    (part,) = staging._parts.values()
    assert chunk.region_offset is not None
    staging._agent.memory[part.offset + chunk.region_offset + 5] ^= 1


async def test_payloads_of_a_region_are_not_in_the_messages(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    sizes = [len(codec.push_to_bytes(part)) for part in parts if isinstance(part, Chunk)]
    assert max(sizes) < 200
    await wire.port.push(stream(parts))
    assert wire.reader.landing.landed == expected_blocks(wire, wire.terms())


async def test_a_byte_that_changes_after_its_checksum_is_found(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    flip(wire, parts)
    with pytest.raises(DataLoss) as lost:
        await wire.port.push(stream(parts))
    assert lost.value.check == "checksum"
    assert wire.reader.all_free()


@pytest.mark.parametrize("offset", [0, 1, 1 << 20, 1 << 62])
async def test_an_offset_outside_the_region_is_refused(wire: Wire, offset: int) -> None:
    parts = await all_parts(wire, wire.terms())
    lying = replace(chunk_of(parts), region_offset=offset)
    with pytest.raises(BadRequest) as refused:
        await wire.port.push(stream([parts[0], lying, *parts[2:]]))
    assert refused.value.param == "chunk.region_offset"
    assert wire.reader.all_free()


async def test_a_chunk_that_names_another_chunk_s_bytes_fails_its_checksum(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    other = parts[2]
    assert isinstance(other, Chunk)
    lying = replace(chunk_of(parts), region_offset=other.region_offset)
    with pytest.raises(DataLoss, match="checksum"):
        await wire.port.push(stream([parts[0], lying, *parts[2:]]))
    assert wire.reader.all_free()


def encoded(**changes: object) -> bytes:
    header = decode_pb2.PushChunk().header
    header.handoff_id, header.generation, header.block_count, header.key_bytes = b"h" * 16, 1, 1, 8
    header.sequence = header.layer = header.block_start = 0
    chunk = decode_pb2.PushChunk(header=header, checksum=7, **changes)  # type: ignore[arg-type]
    return decode_pb2.PushRequest(chunk=chunk).SerializeToString()


def test_an_offset_and_a_payload_are_one_too_many() -> None:
    with pytest.raises(BadRequest, match="a payload as well"):
        codec.push_from_bytes(encoded(region_offset=64, payload=b"12345678"))


def test_neither_an_offset_nor_a_payload_is_too_little() -> None:
    with pytest.raises(DataLoss, match="holds 0 bytes"):
        codec.push_from_bytes(encoded())


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(BadRequest, match="region_offset is -1"):
        codec.push_from_bytes(encoded(region_offset=-1))


async def test_an_offset_without_a_region_is_refused() -> None:
    async with shm_wire() as wire:
        await wire.sender().pair(READER)
        opened, *rest = await all_parts(wire, wire.terms())
        assert isinstance(opened, Open)
        with pytest.raises(BadRequest, match="opened no region"):
            await wire.port.push(stream([opened.inline(), *rest]))
        assert wire.reader.all_free()


async def test_a_payload_in_the_message_is_taken_though_the_push_has_a_region(wire: Wire) -> None:
    parts = [
        part.inline() if isinstance(part, Chunk) else part for part in await all_parts(wire, wire.terms())
    ]
    await wire.port.push(stream(parts))
    assert wire.reader.landing.landed == expected_blocks(wire, wire.terms())


@pytest.mark.parametrize("make_wire", [grpc_wire, loopback_wire])
async def test_a_segment_where_none_was_reserved_is_refused(make_wire: MakeWire) -> None:
    async with make_wire() as wire:
        await wire.sender().pair(READER)
        opened, *rest = await all_parts(wire, wire.terms())
        assert isinstance(opened, Open)
        own = OwnSegment(1 << 12, b"t" * 16)
        with pytest.raises(BadRequest, match="names a segment"):
            await wire.port.push(stream([replace(opened, shm=own.told()), *rest]))
        own.close()
        assert wire.reader.all_free()


async def test_a_transport_s_name_is_a_name_before_it_is_shown() -> None:
    async with grpc_wire() as wire:
        request = codec.encode_reserve(replace(wire.terms(), transport="x" * 100_000), MAX_OUTPUT_TOKENS)
        with pytest.raises(BadRequest, match="100000 characters") as refused:
            codec.decode_reserve(request)
        assert len(str(refused.value)) < 200


async def test_a_transport_that_the_reader_does_not_have_gets_no_room() -> None:
    async with grpc_wire() as wire:
        await wire.sender().pair(READER)
        for name in ("shm", "nixl", "carrier pigeon"):
            with pytest.raises(BadRequest, match="this reader has grpc"):
                await wire.port.reserve(replace(wire.terms(), transport=name), MAX_OUTPUT_TOKENS)
        assert wire.reader.all_free()


async def test_a_segment_of_a_handoff_before_is_refused(shm: Wire) -> None:
    first = await all_parts(shm, shm.terms(number=1))
    await shm.port.push(stream(first))
    shm.unload()
    second = await all_parts(shm, shm.terms(number=2))
    stale, opened = first[0], second[0]
    assert isinstance(stale, Open)
    assert isinstance(opened, Open)
    with pytest.raises(BadRequest, match="another token"):
        await shm.port.push(stream([replace(opened, shm=stale.shm), *second[1:]]))
    assert shm.reader.pool.counts().free == 61


async def test_a_segment_smaller_than_the_chunks_say_is_refused(shm: Wire) -> None:
    opened, *rest = await all_parts(shm, shm.terms())
    assert isinstance(opened, Open)
    small = OwnSegment(4096, b"t" * 16)
    with pytest.raises(BadRequest, match=r"payload is \[64, 4096\)"):
        await shm.port.push(stream([replace(opened, shm=small.told()), *rest]))
    small.close()
    assert shm.reader.all_free()


async def test_handoffs_leave_no_descriptor_and_no_segment_however_they_end(shm: Wire) -> None:
    transports = shm.transports
    assert transports is not None

    async def good(number: int) -> None:
        terms = shm.terms(number=number)
        cache = FakeCache(shm.contract)
        await shm.sender().hand_over(terms, MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
        taken = shm.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
        shm.reader.pool.free(taken.blocks, "sequence")

    async def broken(number: int) -> None:
        async def failing() -> AsyncIterator[int]:
            yield 20
            raise Exhausted("no room to prefill", retry_after_s=2.0)

        terms, cache = shm.terms(number=number), FakeCache(shm.contract)
        with pytest.raises(Exhausted):
            await shm.sender().hand_over(terms, MAX_OUTPUT_TOKENS, failing(), cache, first_token())
        await shm.reader.emptied()

    await good(100)
    before = open_fds()
    for number in range(5):
        await broken(200 + number)
        await good(300 + number)
    assert open_fds() <= before
    assert transports._shm.in_use_bytes() == 0


async def test_a_transport_that_is_asked_for_and_does_not_work_refuses_the_pair() -> None:
    async with grpc_wire() as wire:
        wire.transports = WriterTransports(wanted="shm")
        with pytest.raises(Unavailable, match="decode side: it takes payloads in messages only"):
            await wire.sender().pair(READER)
        wire.transports = WriterTransports(wanted="auto")
        sender = wire.sender()
        await sender.pair(READER)
        assert sender.choice is not None
        assert sender.choice.name == "grpc"


@pytest.mark.skipif(not SUPPORTED, reason="sealed memory files are a thing of Linux")
async def test_a_pair_on_one_host_proves_shared_memory_and_takes_it(shm: Wire) -> None:
    shm.transports = WriterTransports(wanted="auto")
    sender = shm.sender()
    answer = await sender.pair(READER)
    assert sender.choice is not None
    assert (sender.choice.name, answer.transports[-1]) == ("shm", ALWAYS_GRPC)
    assert "read its token" in sender.choice.reason


def staging_of(wire: Wire) -> Staging:
    staging = wire.reader.receiver._transports._staging
    assert staging is not None
    return staging


async def test_a_writer_that_goes_silent_keeps_its_staging_from_everybody_until_it_says_so() -> None:
    async with loopback_wire() as wire:
        await wire.sender().pair(READER)
        terms = wire.terms()
        await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
        wire.reader.alarms.advance(30.0)
        assert wire.reader.all_free()
        assert wire.reader.receiver.quarantined_bytes() > 0
        await wire.port.release(terms.handoff_id, "the coordinator gave up")
        assert wire.reader.receiver.quarantined_bytes() > 0
        await wire.port.release(terms.handoff_id, "the writer gave up", writer_stopped=True)
        assert wire.reader.receiver.quarantined_bytes() == 0


async def test_a_late_write_reaches_no_other_handoff() -> None:
    theirs, ours = LoopbackAgent(), LoopbackAgent()
    async with nixl_wire(agents=(theirs, ours)) as wire:
        await wire.sender().pair(READER)
        late = wire.terms(number=1)
        await all_parts(wire, late)
        writes = list(theirs.writes)
        wire.reader.alarms.advance(30.0)
        on_time = wire.terms(number=2)
        parts = await all_parts(wire, on_time)
        for write in writes:
            theirs.memory[:] = b"\xee" * len(theirs.memory)
            write.land()
        await wire.port.push(stream(parts))
        assert wire.reader.landing.landed == expected_blocks(wire, on_time)


async def test_a_late_write_into_a_part_that_was_given_away_all_the_same_is_found() -> None:
    theirs, ours = LoopbackAgent(), LoopbackAgent()
    async with nixl_wire(agents=(theirs, ours)) as wire:
        await wire.sender().pair(READER)
        late = wire.terms(number=1)
        await all_parts(wire, late)
        writes = list(theirs.writes)
        await wire.port.release(late.handoff_id, "a lie", writer_stopped=True)
        parts = await all_parts(wire, wire.terms(number=2))
        theirs.memory[:] = b"\xee" * len(theirs.memory)
        writes[0].land()
        with pytest.raises(DataLoss, match="checksum"):
            await wire.port.push(stream(parts))


@pytest.mark.skipif(not SUPPORTED, reason="sealed memory files are a thing of Linux")
@pytest.mark.parametrize("meanwhile", [True, False])
async def test_a_handoff_keeps_the_transport_it_was_reserved_for_when_the_pair_agrees_on_another(
    meanwhile: bool,
) -> None:
    """The reader, new to shared memory, is paired again while Reserve is on its way, or before it."""
    writer = WriterTransports()
    async with in_process_wire() as wire:
        wire.transports = writer
        receiver = wire.reader.receiver

        class PairsAgain(InProcessReaderPort):
            async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
                if meanwhile:
                    await sender.pair(READER)
                return await super().reserve(terms, max_output_tokens)

        sender = wire.sender(PairsAgain(receiver))
        await sender.pair(READER)
        assert sender.choice is not None
        assert sender.choice.name == "grpc"
        with_transports(wire.reader)
        if not meanwhile:
            await sender.pair(READER)
        terms, cache = wire.terms(), FakeCache(wire.contract)
        await sender.hand_over(terms, MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
        assert sender.choice.name == "shm"
        assert receiver.counters().committed == 1
    writer.close()


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_writer_that_is_cancelled_waits_for_the_thread_that_fills_its_segment(cancels: int) -> None:
    """Else the segment would serve the next handoff while bytes of this one still get into it."""
    async with shm_in_process_wire() as wire:
        await wire.sender().pair(READER)
        cache = FakeCache(wire.contract)
        cache.gate.clear()
        sending = asyncio.ensure_future(
            wire.sender().hand_over(wire.terms(), MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
        )
        await asyncio.to_thread(cache.entered.wait, 10)
        for _ in range(cancels):
            sending.cancel()
            for _ in range(50):
                await asyncio.sleep(0)
        assert not sending.done()
        cache.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert cache.running == 0
        await wire.reader.emptied()


async def test_full_staging_says_when_to_try_again_and_keeps_no_block() -> None:
    async with nixl_wire(agents=(LoopbackAgent(), LoopbackAgent(size_bytes=1 << 15))) as wire:
        await wire.sender().pair(READER)
        await wire.port.reserve(wire.terms(number=1), MAX_OUTPUT_TOKENS)
        free = wire.reader.pool.counts().free
        with pytest.raises(Exhausted, match="of staging"):
            await wire.port.reserve(wire.terms(number=2), MAX_OUTPUT_TOKENS)
        assert wire.reader.pool.counts().free == free
        with pytest.raises(BadRequest, match="raise handoff"):
            await wire.port.reserve(wire.terms(number=3, prompt_tokens=100), MAX_OUTPUT_TOKENS)
        assert wire.reader.pool.counts().free == free


async def test_a_committed_handoff_frees_its_staging_before_it_is_decoded() -> None:
    async with loopback_wire() as wire:
        await wire.sender().pair(READER)
        await wire.sender().hand_over(
            wire.terms(), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
        )
        staging = staging_of(wire)
        assert staging._arena.free_bytes() == staging._arena.size_bytes
        assert staging.quarantined_bytes() == 0


async def test_a_write_that_can_not_be_stopped_leaves_its_staging_in_quarantine() -> None:
    theirs = LoopbackAgent(gate=False, stoppable=False)
    async with nixl_wire(agents=(theirs, LoopbackAgent())) as wire:
        await wire.sender().pair(READER)
        sending = asyncio.ensure_future(
            wire.sender().hand_over(
                wire.terms(), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
            )
        )
        await asyncio.to_thread(theirs.began.wait, 10)
        sending.cancel()
        with pytest.raises((asyncio.CancelledError, KvpactError)):
            await sending
        await wire.reader.emptied()
        assert wire.reader.receiver.quarantined_bytes() > 0
