"""Staging: a part of it serves another handoff only after its writer said that it stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.errors import BadRequest, Exhausted, Unavailable
from kvpact.handoff.arena import Arena
from kvpact.handoff.nixl_agent import why_not
from kvpact.handoff.nixl_staging import Staging
from kvpact.handoff.nixl_transport import SLOTS, NixlWriter, StillMoving
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.regions import NixlRegion
from kvpact.handoff.transport_choice import TransportOffer
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.types import HandoffId, WorkerLife
from tests.handoff_fakes import WRITER, make_handoff_id
from tests.region_wires import LoopbackAgent, LoopbackWrite

SIZE = 1 << 16
ONE, OTHER = make_handoff_id(1), make_handoff_id(2)


@pytest.fixture
def agent() -> LoopbackAgent:
    return LoopbackAgent(size_bytes=SIZE)


@pytest.fixture
def staging(agent: LoopbackAgent) -> Iterator[Staging]:
    staging = Staging(agent)
    yield staging
    staging.close()


def grant(staging: Staging, handoff_id: HandoffId = ONE, size_bytes: int = SIZE) -> NixlRegion:
    return staging.grant(handoff_id, WRITER, size_bytes)


def test_no_room_says_when_to_try_again_and_how_much_is_in_quarantine(staging: Staging) -> None:
    grant(staging)
    staging.give_back(ONE, writer_stopped=False)
    with pytest.raises(Exhausted, match=f"0 of {SIZE} are free, {SIZE} are in quarantine") as exhausted:
        grant(staging, OTHER, 64)
    assert exhausted.value.retry_after_s > 0


def test_what_can_never_fit_is_no_question_of_time(staging: Staging) -> None:
    with pytest.raises(BadRequest, match="raise handoff"):
        grant(staging, ONE, SIZE + 1)


def test_a_part_whose_writer_went_silent_stays_set_aside_until_it_says_that_it_stopped(
    staging: Staging,
) -> None:
    grant(staging)
    staging.give_back(ONE, writer_stopped=False)
    assert staging.quarantined_bytes() == SIZE
    staging.give_back(ONE, writer_stopped=False)
    with pytest.raises(Exhausted):
        grant(staging, OTHER)
    staging.give_back(ONE, writer_stopped=True)
    assert staging.quarantined_bytes() == 0
    grant(staging, OTHER)


def test_a_commit_frees_the_part_and_the_end_of_the_handoff_does_not_free_it_twice(staging: Staging) -> None:
    grant(staging)
    staging.give_back(ONE, writer_stopped=True)
    grant(staging, OTHER)
    staging.give_back(ONE, writer_stopped=False)
    staging.give_back(ONE, writer_stopped=True)
    with pytest.raises(Exhausted):
        grant(staging, make_handoff_id(3), 64)


def test_a_writer_s_next_life_frees_what_its_last_one_left_and_nothing_that_is_in_use(
    staging: Staging,
) -> None:
    half = SIZE // 2
    grant(staging, ONE, half)
    grant(staging, OTHER, half)
    staging.give_back(ONE, writer_stopped=False)
    staging.writer_lives(WRITER)
    staging.writer_lives(WorkerLife(worker="prefill-9", incarnation=b"n" * 16))
    assert staging.quarantined_bytes() == half
    staging.writer_lives(WorkerLife(worker=WRITER.worker, incarnation=b"n" * 16))
    assert staging.quarantined_bytes() == 0
    with pytest.raises(Exhausted):
        grant(staging, make_handoff_id(3))


def test_parts_do_not_overlap_and_a_region_sees_its_own_alone(agent: LoopbackAgent, staging: Staging) -> None:
    one, other = grant(staging, ONE, 128), grant(staging, OTHER, 128)
    assert one.address + one.size_bytes <= other.address or other.address + 128 <= one.address


async def test_the_agent_is_polled_only_while_a_push_is_open(agent: LoopbackAgent) -> None:
    naps: asyncio.Queue[float] = asyncio.Queue(1)
    staging = Staging(agent, sleep=naps.put)
    grant(staging)
    await asyncio.sleep(0)
    assert agent.polls == 0
    region = staging.region(ONE)
    await naps.get()
    await naps.get()
    assert agent.polls >= 2
    region.close(reusable=True)
    region.close(reusable=True)
    await asyncio.sleep(0)
    seen = agent.polls
    await asyncio.sleep(0)
    assert agent.polls == seen
    staging.close()


async def test_an_agent_that_could_not_be_polled_once_is_polled_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stumbling(LoopbackAgent):
        def poll(self) -> None:
            LoopbackAgent.poll(self)
            if self.polls in (1, 2):
                raise RuntimeError("a peer went away")

    naps: asyncio.Queue[float] = asyncio.Queue(1)
    stumbling = Stumbling(size_bytes=SIZE)
    staging = Staging(stumbling, sleep=naps.put)
    grant(staging)
    region = staging.region(ONE)
    for _ in range(4):
        await naps.get()
    assert stumbling.polls >= 4
    assert caplog.text.count("a peer went away") == 1
    region.close(reusable=True)
    staging.close()


async def test_a_region_is_read_only_and_bounded(agent: LoopbackAgent, staging: Staging) -> None:
    part = grant(staging, ONE, 256)
    region = staging.region(ONE)
    assert region.view(64, 192).readonly
    for offset, size_bytes in ((-64, 8), (0, 8), (64, 193), (1 << 62, 1)):
        with pytest.raises(BadRequest, match="region_offset"):
            region.check(offset, size_bytes)
    assert part.size_bytes == 256
    region.close(reusable=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_an_arena_conserves_its_bytes_and_never_gives_one_twice(steps: list[tuple[bool, int]]) -> None:
    arena, taken = Arena(1 << 14), {}
    for take, size_bytes in steps:
        if take:
            offset = arena.take(size_bytes)
            if offset is not None:
                taken[offset] = arena.length(offset)
                assert arena.length(offset) >= size_bytes
        elif taken:
            arena.give(offset := sorted(taken)[size_bytes % len(taken)])
            del taken[offset]
        runs = sorted(taken.items())
        assert all(start + length <= after for (start, length), (after, _) in pairwise(runs))
        assert arena.free_bytes() + sum(taken.values()) == 1 << 14
    for offset in taken:
        arena.give(offset)
    assert arena.take(1 << 14) == 0


async def test_a_write_is_awaited_without_a_thread_that_spins(agent: LoopbackAgent) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        agent.gate = len(naps) == 3

    agent.gate = False
    writer = NixlWriter(agent, sleep=nap)
    target = LoopbackAgent(size_bytes=SIZE)
    agent.memory[:4] = b"abcd"
    await writer.write("peer", 0, 4, target.address + 8)
    assert bytes(target.memory[8:12]) == b"abcd"
    assert naps == sorted(naps)
    assert len(naps) == 3
    writer.close()


async def test_a_cancelled_write_that_stops_frees_its_run_and_one_that_does_not_keeps_it() -> None:
    for stoppable in (True, False):
        agent, target = LoopbackAgent(size_bytes=SIZE, gate=False, stoppable=stoppable), LoopbackAgent()
        started = asyncio.Event()

        async def nap(_: float, started: asyncio.Event = started) -> None:
            started.set()
            await asyncio.get_running_loop().create_future()

        writer = NixlWriter(agent, sleep=nap)
        carrier = await writer.carrier(b"peer")
        cargo = await carrier.load(NixlRegion(address=target.address, size_bytes=256), 256, 64)
        cargo.space(64, 64)
        shipping = asyncio.ensure_future(cargo.ship(64, 64))
        await started.wait()
        shipping.cancel()
        with pytest.raises(asyncio.CancelledError if stoppable else StillMoving):
            await shipping
        assert cargo.still() is stoppable
        cargo.close(acknowledged=False)
        assert writer.quarantined_bytes() == (0 if stoppable else SLOTS * 64)
        writer.close()
        assert agent.closed


async def test_a_write_that_is_cancelled_again_while_it_is_stopped_is_not_taken_for_a_still_one() -> None:
    stopping, stop = threading.Event(), threading.Event()

    class SlowToStop(LoopbackWrite):
        def stop(self) -> bool:
            stopping.set()
            assert stop.wait(10)
            return False

    class Slow(LoopbackAgent):
        def write(self, peer: str, offset: int, size_bytes: int, address: int) -> LoopbackWrite:
            source = self.address + offset
            return SlowToStop(agent=self, source=source, size_bytes=size_bytes, address=address)

    target, started = LoopbackAgent(size_bytes=SIZE), asyncio.Event()

    async def nap(_: float) -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    writer = NixlWriter(Slow(gate=False), sleep=nap)
    carrier = await writer.carrier(b"peer")
    cargo = await carrier.load(NixlRegion(address=target.address, size_bytes=128), 128, 64)
    cargo.space(64, 64)
    shipping = asyncio.ensure_future(cargo.ship(64, 64))
    await started.wait()
    shipping.cancel()
    await asyncio.to_thread(stopping.wait, 10)
    shipping.cancel()
    stop.set()
    with pytest.raises(StillMoving):
        await shipping
    assert not cargo.still()
    writer.close()


async def test_an_agent_starts_off_the_event_loop_and_serves_one_thread_from_then_on() -> None:
    """Starting takes most of a second, and an agent that two threads call at once breaks."""
    starts: list[int] = []
    uses: set[int] = set()

    class WatchedWrite(LoopbackWrite):
        def state(self) -> str:
            uses.add(threading.get_ident())
            return LoopbackWrite.state(self)

    class Watched(LoopbackAgent):
        def meet(self, metadata: bytes) -> str:
            uses.add(threading.get_ident())
            return LoopbackAgent.meet(self, metadata)

        def write(self, peer: str, offset: int, size_bytes: int, address: int) -> LoopbackWrite:
            uses.add(threading.get_ident())
            source = self.address + offset
            return WatchedWrite(agent=self, source=source, size_bytes=size_bytes, address=address)

    def started(agent: LoopbackAgent) -> LoopbackAgent:
        starts.append(threading.get_ident())
        return agent

    target = LoopbackAgent(size_bytes=SIZE)
    reader = ReaderTransports(open_staging=lambda: Staging(started(target)))
    writer = WriterTransports(wanted="nixl", open_nixl=lambda: NixlWriter(started(Watched())))
    offers = await asyncio.gather(reader.offers(WRITER, None), reader.offers(WRITER, None))
    agreed = await asyncio.gather(writer.agree(offers[0]), writer.agree(offers[1]))
    for choice, carrier in agreed:
        assert choice.name == "nixl"
        assert carrier is not None
        region = NixlRegion(address=target.address, size_bytes=128)
        cargo = await carrier.load(region, 128, 64)
        cargo.space(64, 64)
        await cargo.ship(64, 64)
        cargo.close(acknowledged=True)
    assert threading.get_ident() not in {*starts, *uses}
    assert (len(starts), len(uses)) == (2, 1)
    writer.close()
    reader.close()


async def test_an_agent_whose_starting_nobody_waited_for_serves_the_next_pair() -> None:
    """Two agents of one process would have one name."""
    starts: list[LoopbackAgent] = []
    entered, gate = threading.Event(), threading.Event()

    def started() -> LoopbackAgent:
        starts.append(LoopbackAgent(size_bytes=SIZE))
        entered.set()
        assert gate.wait(10)
        return starts[-1]

    reader = ReaderTransports(open_staging=lambda: Staging(started()))
    writer = WriterTransports(wanted="nixl", open_nixl=lambda: NixlWriter(started()))
    offers = (TransportOffer(name="nixl", available=True, reason="", agent=b"peer"),)
    for count, ask in enumerate((lambda: reader.offers(WRITER, None), lambda: writer.agree(offers)), 1):
        entered.clear()
        gate.clear()
        asking = asyncio.ensure_future(ask())
        await asyncio.to_thread(entered.wait, 10)
        asking.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await ask()
        assert len(starts) == count
    writer.close()
    reader.close()
    assert all(agent.closed for agent in starts)


async def test_a_grant_that_is_too_small_is_not_written_to(agent: LoopbackAgent) -> None:
    writer = NixlWriter(agent)
    carrier = await writer.carrier(b"peer")
    for region in (None, NixlRegion(address=1, size_bytes=100)):
        with pytest.raises(Unavailable, match="granted"):
            await carrier.load(region, 101, 64)
    with pytest.raises(Exhausted, match="writer's staging"):
        await carrier.load(NixlRegion(address=1, size_bytes=100), 100, SIZE)
    writer.close()


def test_a_missing_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.handoff.nixl_agent.PACKAGES", ("no_such_package",))
    problem = why_not()
    assert problem is not None
    assert "make install-nixl" in problem or "Linux" in problem
