"""The sender: what it sends when, how it keeps the lease, and how it lets go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvpact.contract.contract import Contract
from kvpact.errors import ContractRefused, Fenced, Unavailable, UnknownHandoff
from kvpact.handoff import sender as sender_module
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.messages import Buffer, Chunk, HandoffState, HandoffTerms, Open, PushPart, Reservation
from kvpact.handoff.outgoing import Outgoing
from kvpact.types import HandoffId, VerdictWord, WorkerLife
from tests.factories import make_contract, make_group
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    first_token,
    in_process_wire,
    make_reader,
    order_of,
    progress,
)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        yield wire


async def never() -> AsyncIterator[int]:
    yield 20
    await asyncio.get_running_loop().create_future()


async def chunks_of(wire: Wire, *computed: int, prompt_tokens: int = 50) -> list[Chunk]:
    terms = wire.terms(prompt_tokens=prompt_tokens)
    reservation = await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
    outgoing = Outgoing(
        terms=terms, reservation=reservation, contract=wire.contract, clock=wire.clock, executor=None
    )
    parts = [
        part async for part in outgoing.parts(progress(*computed), FakeCache(wire.contract), first_token())
    ]
    assert isinstance(parts[0], Open)
    return [part for part in parts if isinstance(part, Chunk)]


def ranges(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [
        (c.header.layer, c.header.block_start, c.header.block_start + c.header.block_count) for c in chunks
    ]


async def test_complete_blocks_go_out_as_they_come_and_the_partial_one_last(wire: Wire) -> None:
    chunks = await chunks_of(wire, 10, 33, 47, 48, 50)
    assert ranges(chunks) == [(0, 0, 2), (1, 0, 2), (0, 2, 3), (1, 2, 3), (0, 3, 4), (1, 3, 4)]
    assert [chunk.header.sequence for chunk in chunks] == [0, 1, 2, 3, 4, 5]


async def test_a_prompt_of_whole_blocks_has_no_partial_one(wire: Wire) -> None:
    assert ranges(await chunks_of(wire, 48, prompt_tokens=48)) == [(0, 0, 3), (1, 0, 3)]


async def test_chunks_stay_under_the_readers_cap_and_hold_one_block_at_least() -> None:
    block_bytes = 2 * 16 * 2 * 16 * 4
    for cap, most in ((2 * block_bytes, 2), (block_bytes - 1, 1)):
        limits = ReceiverLimits(growth_watermark_blocks=0, chunk_cap_bytes=cap)
        async with in_process_wire(reader=make_reader(limits=limits)) as wire:
            await wire.sender().pair(READER)
            chunks = await chunks_of(wire, 50)
            assert {chunk.header.block_count for chunk in chunks} == {most}
            assert len(chunks) == 2 * 4 / most


async def test_blocks_too_large_for_any_message_are_refused_at_pairing() -> None:
    contract = make_contract(layer_groups=(make_group(layers=(0,), kv_heads=2, key_dim=16, value_dim=32768),))
    async with in_process_wire(reader=make_reader(contract=contract), contract=contract) as wire:
        answer = await wire.sender().pair(READER)
        assert answer.verdict.word is VerdictWord.REJECT
        assert [difference.field for difference in answer.verdict.differences] == ["block_size"]
        with pytest.raises(ContractRefused, match="block_size"):
            await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)


async def test_times_and_totals_of_a_handoff_are_told(wire: Wire) -> None:
    clock = wire.clock

    async def computed() -> AsyncIterator[int]:
        clock.advance(5.0)
        yield 32
        clock.advance(2.0)
        yield 40
        clock.advance(1.0)

    sent = await wire.sender().hand_over(
        wire.terms(), MAX_OUTPUT_TOKENS, computed(), FakeCache(wire.contract), first_token()
    )
    assert (sent.handoff_s, sent.exposed_s) == (2.0, 0.0)
    assert (sent.chunk_count, sent.first_token_id) == (4, FIRST_TOKEN_ID)
    assert sent.payload_bytes == 2 * 3 * 2 * 16 * 2 * 16 * 4


class Flaky(InProcessReaderPort):
    """A port whose renewals fail as a test says, and that remembers releases."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.reader.receiver)
        self.failures: list[Exception] = []
        self.renewals = 0
        self.released: list[str] = []
        self.hang = False

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        self.renewals += 1
        if self.failures:
            raise self.failures.pop(0)
        return await super().renew(handoff_id, life)

    async def release(self, handoff_id: HandoffId, reason: str) -> HandoffState | None:
        self.released.append(reason)
        if self.hang:
            await asyncio.get_running_loop().create_future()
        return await super().release(handoff_id, reason)


async def awake(wire: Wire, *, after_s: float) -> None:
    """Lets the sleeping renewal go on after a while, and gives it turns to finish."""
    await wire.fell_asleep.wait()
    wire.fell_asleep.clear()
    wire.clock.advance(after_s)
    wire.asleep.pop().set_result(None)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_lease_is_renewed_until_the_handoff_is_left(wire: Wire) -> None:
    port = Flaky(wire)
    async with wire.sender(port).reserved(wire.terms(), MAX_OUTPUT_TOKENS):
        for _ in range(4):
            await awake(wire, after_s=20.0)
            wire.reader.receiver.sweep()
        assert port.renewals == 4
        assert wire.reader.receiver.held() == 1
    assert port.released == ["the writer gave up"]
    assert wire.asleep.pop().cancelled()
    assert wire.reader.all_free()


async def test_renewals_go_on_over_a_short_silence_and_stop_after_a_long_one(wire: Wire) -> None:
    port = Flaky(wire)
    sending = asyncio.ensure_future(
        wire.sender(port).hand_over(
            wire.terms(), MAX_OUTPUT_TOKENS, never(), FakeCache(wire.contract), first_token()
        )
    )
    port.failures = [Unavailable("silent")]
    await awake(wire, after_s=10.0)
    assert not sending.done()
    port.failures = [Unavailable("still silent")]
    await awake(wire, after_s=25.0)
    with pytest.raises(Unavailable, match="still silent"):
        await sending
    await wire.reader.emptied()


async def test_a_handoff_that_the_reader_ended_ends_the_push(wire: Wire) -> None:
    port = Flaky(wire)
    sending = asyncio.ensure_future(
        wire.sender(port).hand_over(
            wire.terms(), MAX_OUTPUT_TOKENS, never(), FakeCache(wire.contract), first_token()
        )
    )
    port.failures = [UnknownHandoff("ended: quarantined", handoff_id=wire.terms().handoff_id)]
    await awake(wire, after_s=10.0)
    with pytest.raises(UnknownHandoff, match="quarantined"):
        await sending
    await wire.reader.emptied()


async def test_a_committed_handoff_is_not_released_on_leaving(wire: Wire) -> None:
    port = Flaky(wire)
    sender = wire.sender(port)
    await sender.hand_over(
        wire.terms(), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
    )
    assert port.released == []
    assert (
        wire.reader.receiver.take(wire.terms().handoff_id, READER, order_of(wire.terms())).token_ids
        == wire.terms().token_ids
    )


async def test_a_reader_that_does_not_answer_release_is_left_to_the_lease(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "RELEASE_DEADLINE_S", 0.01)
    port = Flaky(wire)
    port.hang = True
    async with wire.sender(port).reserved(wire.terms(), MAX_OUTPUT_TOKENS):
        pass
    assert port.released == ["the writer gave up"]
    wire.reader.alarms.advance(30.0)
    assert wire.reader.all_free()


async def test_a_refused_reservation_raises_what_the_reader_said(wire: Wire) -> None:
    wrong = replace(wire.terms(), reader=replace(READER, incarnation=b"x" * 16))
    with pytest.raises(Fenced):
        async with wire.sender().reserved(wrong, MAX_OUTPUT_TOKENS):
            raise AssertionError("not reached")


async def test_a_refused_reservation_releases_nothing_of_the_handoff_that_has_its_id(wire: Wire) -> None:
    port = Flaky(wire)
    await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    with pytest.raises(Fenced, match="other terms"):
        async with wire.sender(port).reserved(wire.terms(prompt_tokens=41), MAX_OUTPUT_TOKENS):
            raise AssertionError("not reached")
    assert port.released == []
    assert wire.reader.receiver.held() == 1


async def test_a_reservation_whose_answer_got_lost_is_released(wire: Wire) -> None:
    class Lossy(Flaky):
        async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
            await super().reserve(terms, max_output_tokens)
            raise Unavailable("no answer in time")

    with pytest.raises(Unavailable):
        async with wire.sender(Lossy(wire)).reserved(wire.terms(), MAX_OUTPUT_TOKENS):
            raise AssertionError("not reached")
    assert wire.reader.all_free()


class LendingCache(FakeCache):
    """Tells that its reads are mere looks, and keeps the threads that they come from."""

    def __init__(self, contract: Contract) -> None:
        super().__init__(contract)
        self.threads: set[threading.Thread] = set()

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """See BlockReader."""
        self.threads.add(threading.current_thread())
        return super().__call__(layer, blocks)

    def lends(self, layer: int, blocks: range) -> bool:
        """See BlockReader."""
        return layer == 0


async def test_blocks_that_are_lent_are_read_on_the_loop_and_go_out_in_order(wire: Wire) -> None:
    cache, token = LendingCache(wire.contract), first_token()
    terms = wire.terms(prompt_tokens=50)
    await wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, progress(33, 50), cache, token)
    assert threading.current_thread() in cache.threads
    assert cache.threads != {threading.current_thread()}
    landed = wire.reader.landing.landed
    assert {place[1:]: landed[place] for place in landed} == {
        (layer, block): cache.block(layer, block) for layer in (0, 1) for block in range(4)
    }


async def test_a_landing_has_payloads_that_outlive_what_was_lent(wire: Wire) -> None:
    class Keeping(FakeCache):
        def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
            keys, values = (bytearray(part) for part in super().__call__(layer, blocks))
            lent.extend((keys, values))
            return memoryview(keys), memoryview(values)

    cache, lent = Keeping(wire.contract), list[bytearray]()
    wire.reader.landing.gate.clear()
    sending = asyncio.ensure_future(
        wire.sender().hand_over(wire.terms(), MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
    )
    await asyncio.to_thread(wire.reader.landing.entered.wait, 10)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    for part in lent:
        part[:] = bytes(len(part))
    wire.reader.landing.gate.set()
    await wire.reader.emptied()
    landed = wire.reader.landing.landed
    assert landed == {place: cache.block(*place[1:]) for place in landed}
    assert landed


async def test_a_cancelled_sender_waits_for_the_thread_that_reads_the_cache(wire: Wire) -> None:
    cache, token = FakeCache(wire.contract), first_token()
    cache.gate.clear()
    sending = asyncio.ensure_future(
        wire.sender().hand_over(wire.terms(), MAX_OUTPUT_TOKENS, progress(40), cache, token)
    )
    await asyncio.to_thread(cache.entered.wait, 10)
    sending.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done()
    cache.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert cache.running == 0
    await wire.reader.emptied()


async def test_an_error_of_the_cache_or_of_the_first_token_comes_out_as_it_is(wire: Wire) -> None:
    class Broken(FakeCache):
        def __call__(self, layer: int, blocks: range) -> tuple[bytes, bytes]:
            raise ValueError("no such block")

    class BrokenLender(Broken, LendingCache):
        pass

    for number, broken in enumerate((Broken, BrokenLender), start=3):
        cache, terms = broken(wire.contract), wire.terms(number=number)
        with pytest.raises(ValueError, match="no such block"):
            await wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("sampling failed"))
    with pytest.raises(ValueError, match="sampling failed"):
        await wire.sender().hand_over(
            wire.terms(number=2), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), failed
        )
    await wire.reader.emptied()


async def test_no_more_parts_are_read_ahead_than_few() -> None:
    limits = ReceiverLimits(growth_watermark_blocks=0, chunk_cap_bytes=1)
    async with in_process_wire(reader=make_reader(limits=limits)) as wire:
        await wire.sender().pair(READER)
        terms = wire.terms()
        reservation = await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
        outgoing = Outgoing(
            terms=terms, reservation=reservation, contract=wire.contract, clock=wire.clock, executor=None
        )
        cache = FakeCache(wire.contract)
        parts = outgoing.parts(progress(40), cache, first_token())
        seen: list[PushPart] = [await anext(parts), await anext(parts)]
        assert isinstance(seen[1], Chunk)
        await outgoing.settled()
        assert cache.reads in ([(0, range(1))], [(0, range(1)), (0, range(1, 2))])
        await parts.aclose()
