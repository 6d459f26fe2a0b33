"""Each fault at each step of a handoff: it ends once, for the right reason, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from kvpact.errors import BadRequest, DataLoss, Fenced, KvpactError, Unavailable, UnknownHandoff
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.handoff_table import ReceiverCounters
from kvpact.handoff.messages import HandoffState, HandoffTerms
from kvpact.handoff.nixl_agent import why_not
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.receiver import Taken
from kvpact.handoff.sender import Sender, Sent
from kvpact.types import WorkerLife
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    WRITER,
    FakeCache,
    FakeReader,
    Wire,
    expected_blocks,
    first_token,
    make_reader,
    order_of,
    progress,
    stream,
)
from tests.handoff_faults import CHUNK_STEPS, CHUNKS, PUSHED, Fault, FaultyPort, Script, Step
from tests.handoff_proxy import Proxy, proxied
from tests.leaks import holdings, nothing_left
from tests.region_wires import ALL_WIRES, real_agent

LEASE_S = 30.0
REBORN_READER = WorkerLife(worker=READER.worker, incarnation=b"R" * 16)
REBORN_WRITER = WorkerLife(worker=WRITER.worker, incarnation=b"W" * 16)
COMPUTED = (16, 32, 40)
"""Prompt tokens as prefill makes them: CHUNKS chunks in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a handoff ends. `error` None: it lands."""

    error: type[BaseException] | None = None
    check: str | None = None
    counted: str | None = "failed"
    """The reader's counter that goes up by one; None where it set nothing aside."""
    by_lease: bool = False
    """Blocks come back with the lease, and not before."""


LANDS = End(counted="committed")
BROKEN = End(error=DataLoss, check="order")
SHORT = End(error=DataLoss, check="totals")
NO_OPEN = End(error=BadRequest)
FENCED = End(error=Fenced)
EXPIRES = End(error=UnknownHandoff)
UNHEARD = End(error=Unavailable)
GIVEN_UP = End(error=asyncio.CancelledError)
ORPHANED = End(error=Unavailable, by_lease=True)
NOTHING = {
    end: replace(end, counted=None) for end in (NO_OPEN, FENCED, UNHEARD, GIVEN_UP)
}  # before any block was set aside

DYING = {Fault.SENDER_DIES: UNHEARD, Fault.RECEIVER_DIES: UNHEARD, Fault.CANCELLED: GIVEN_UP}
TABLE: dict[tuple[Step, Fault], End] = {
    (Step.PAIR, Fault.LOST): NOTHING[UNHEARD],
    (Step.PAIR, Fault.TWICE): LANDS,
    (Step.PAIR, Fault.CORRUPTED): NOTHING[NO_OPEN],
    (Step.PAIR, Fault.STALLED): NOTHING[UNHEARD],
    **{(Step.PAIR, fault): NOTHING[end] for fault, end in DYING.items()},
    (Step.RESERVE, Fault.LOST): NOTHING[UNHEARD],
    (Step.RESERVE, Fault.TWICE): LANDS,
    (Step.RESERVE, Fault.CORRUPTED): NOTHING[NO_OPEN],
    (Step.RESERVE, Fault.STALLED): NOTHING[UNHEARD],
    (Step.RESERVE, Fault.SENDER_DIES): ORPHANED,
    (Step.RESERVE, Fault.RECEIVER_DIES): NOTHING[UNHEARD],
    (Step.RESERVE, Fault.CANCELLED): GIVEN_UP,
    (Step.OPEN, Fault.LOST): NO_OPEN,
    (Step.OPEN, Fault.TWICE): FENCED,
    (Step.OPEN, Fault.REORDERED): NO_OPEN,
    (Step.OPEN, Fault.CORRUPTED): FENCED,
    (Step.OPEN, Fault.STALLED): EXPIRES,
    **{(Step.OPEN, fault): end for fault, end in DYING.items()},
    (Step.OPEN, Fault.SENDER_DIES): ORPHANED,
    **{(step, Fault.LOST): BROKEN for step in CHUNK_STEPS},
    **{(step, Fault.TWICE): BROKEN for step in CHUNK_STEPS},
    **{(step, Fault.REORDERED): BROKEN for step in CHUNK_STEPS},
    **{(step, Fault.CORRUPTED): End(error=DataLoss, check="checksum") for step in CHUNK_STEPS},
    **{(step, Fault.STALLED): EXPIRES for step in CHUNK_STEPS},
    **{(step, fault): end for step in CHUNK_STEPS for fault, end in DYING.items()},
    (CHUNK_STEPS[-1], Fault.LOST): SHORT,
    (CHUNK_STEPS[-1], Fault.REORDERED): SHORT,
    (Step.COMMIT, Fault.LOST): SHORT,
    (Step.COMMIT, Fault.TWICE): LANDS,
    (Step.COMMIT, Fault.REORDERED): SHORT,
    (Step.COMMIT, Fault.CORRUPTED): SHORT,
    (Step.COMMIT, Fault.STALLED): EXPIRES,
    **{(Step.COMMIT, fault): end for fault, end in DYING.items()},
    (Step.AFTER, Fault.LOST): End(error=Unavailable, counted="committed"),
}
AFTER = {(Step.AFTER, fault) for fault in Fault if fault is not Fault.LOST}
"""Each has a test of its own below: what comes after the commit is an order to decode."""
CANT_BE = {
    (Step.PAIR, Fault.REORDERED): "Reserve is sent when the answer to Pair is there, so none overtakes it; "
    "an offer of an old life that comes late has a test of its own",
    (Step.RESERVE, Fault.REORDERED): "a push needs the answer to Reserve, so none overtakes it; a Release "
    "that does is the stalled cell",
}
FULL = ("in_process", "grpc")
OF_ALL = (Fault.CORRUPTED, Fault.STALLED, Fault.SENDER_DIES, Fault.RECEIVER_DIES)
"""Faults that ask a transport for something of its own: bytes outside messages, a region to give back."""
STEPS_OF_ALL = (Step.RESERVE, Step.OPEN, CHUNK_STEPS[0], CHUNK_STEPS[3], CHUNK_STEPS[-1], Step.COMMIT)
CELLS = [
    pytest.param(wire, step, fault, id=f"{wire}-{step}-{fault}".replace(" ", "_"))
    for wire in ALL_WIRES
    for step, fault in TABLE
    if wire in FULL or (fault in OF_ALL and step in STEPS_OF_ALL)
]


@dataclass(slots=True, kw_only=True)
class Road:
    """A reader at the end of a faulty road."""

    name: str
    wire: Wire
    port: ReaderPort
    script: Script
    stack: AsyncExitStack
    proxy: Proxy | None
    caches: list[FakeCache] = field(default_factory=list)
    writer: WorkerLife = WRITER
    """The writer's process life now."""

    @property
    def reader(self) -> FakeReader:
        """The reader's process life now."""
        return self.wire.reader

    def sender(self, life: WorkerLife = WRITER) -> Sender:
        """The writer's side, in one of its lives."""
        return self.wire.sender(self.port, life)

    def terms(self, number: int, writer: WorkerLife = WRITER) -> HandoffTerms:
        """Terms of a prompt of 40 tokens."""
        return replace(self.wire.terms(number=number), writer=writer, reader=self.reader.life)

    async def hand_over(self, number: int, writer: WorkerLife = WRITER) -> Sent:
        """Pair, reserve, push, commit."""
        sender, cache = self.sender(writer), FakeCache(self.wire.contract)
        self.caches.append(cache)
        await sender.pair(self.reader.life)
        return await sender.hand_over(
            self.terms(number, writer), MAX_OUTPUT_TOKENS, progress(*COMPUTED), cache, first_token()
        )

    def take(self, number: int, writer: WorkerLife = WRITER) -> Taken:
        """What Decode takes."""
        terms = self.terms(number, writer)
        return self.reader.receiver.take(terms.handoff_id, self.reader.life, order_of(terms))

    async def restart_reader(self) -> None:
        """Another life of the reader at the same address."""
        reader = replace(make_reader(life=REBORN_READER), alarms=self.reader.alarms)
        self.wire = await self.stack.enter_async_context(ALL_WIRES[self.name](reader=reader))
        if self.proxy is None:
            self.port = FaultyPort(self.wire.port, self.script)
        else:
            assert isinstance(self.wire.port, GrpcReaderPort)
            self.proxy.forward_to(self.wire.port.endpoint)

    async def lands(self, number: int, writer: WorkerLife = WRITER) -> None:
        """A handoff without a fault lands every byte, is taken, and its blocks come back."""
        await self.hand_over(number, writer)
        expected = expected_blocks(self.wire, self.terms(number, writer))
        assert {key: self.reader.landing.landed[key] for key in expected} == expected
        self.reader.pool.free(self.take(number, writer).blocks, "sequence")
        assert self.reader.all_free()


@asynccontextmanager
async def road(name: str, step: Step | None = None, fault: Fault | None = None) -> AsyncIterator[Road]:
    """A road over one transport with one fault on it."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(ALL_WIRES[name]())
        script = Script(step=step, fault=fault, kill=wire.reader.receiver.close)
        stack.callback(script.forget)
        port: ReaderPort = FaultyPort(wire.port, script)
        proxy = None
        if isinstance(wire.port, GrpcReaderPort) and name == "grpc":
            proxy, endpoint = await stack.enter_async_context(proxied(script, wire.port.endpoint))
            remote = GrpcReaderPort(endpoint, READER)
            stack.push_async_callback(remote.close)
            port = remote
        yield Road(name=name, wire=wire, port=port, script=script, stack=stack, proxy=proxy)


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """What gRPC keeps for the whole process is there before anything is counted, and stays."""
    kept: list[object] = [asyncio.run(_once("grpc"))]
    if why_not() is None:
        kept += [real_agent("writer"), real_agent("reader"), asyncio.run(_once("nixl"))]
    yield
    kept.clear()


async def _once(name: str) -> grpc.aio.Channel:
    """A channel that nobody uses: while there is one, gRPC keeps its thread and its descriptors."""
    kept = grpc.aio.insecure_channel("127.0.0.1:1")
    async with road(name) as way:
        await way.lands(1)
    return kept


@pytest.fixture(autouse=True)
def no_thread_left_behind(warm: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Looks at more than threads, in place of the fixture of this name: after the test's loop is closed."""
    with nothing_left():
        yield
        # Errors among the arguments of a record hold frames, and these the bytes that were sent.
        caplog.get_records("call").clear()


async def met(way: Road) -> KvpactError | asyncio.CancelledError | None:
    """Runs the handoff into its fault, and what it ended with."""
    handing = asyncio.ensure_future(way.hand_over(1))
    reached = asyncio.ensure_future(way.script.reached.wait())
    await asyncio.wait([handing, reached], return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    match way.script.fault:
        case Fault.STALLED if way.script.step in PUSHED:
            await way.wire.fell_asleep.wait()
            way.reader.alarms.advance(LEASE_S)
            way.wire.asleep[0].set_result(None)
        case Fault.SENDER_DIES:
            way.script.cut.set()
        case Fault.CANCELLED:
            handing.cancel()
    (outcome,) = await asyncio.gather(handing, return_exceptions=True)
    assert not isinstance(outcome, BaseException) or isinstance(outcome, KvpactError | asyncio.CancelledError)
    return outcome if isinstance(outcome, BaseException) else None


REFUSALS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT)


async def late_messages_are_refused(way: Road, messages: list[Any]) -> None:
    """Whatever the writer sent is worth nothing when it comes again."""
    script, way.script.cut = way.script, asyncio.Event()
    for outcome in await script.settle():
        if script.step is not Step.PAIR:
            assert isinstance(outcome, Exception)
    if messages and way.proxy is not None:
        assert await way.proxy.replay(messages) in REFUSALS
    elif messages:
        with pytest.raises((UnknownHandoff, Fenced, BadRequest)):
            await way.wire.port.push(stream(messages))
    terms = way.terms(1)
    assert await way.wire.port.release(terms.handoff_id, "late") in (None, HandoffState.RELEASED)


@pytest.mark.parametrize(("name", "step", "fault"), CELLS)
async def test_a_fault_ends_the_handoff_once_for_its_reason_and_the_next_one_lands(
    name: str, step: Step, fault: Fault
) -> None:
    expected = TABLE[step, fault]
    async with road(name, step, fault) as way:
        first_life = way.reader
        error = await met(way)
        assert type(error) is (expected.error or type(None))
        if expected.check is not None:
            assert isinstance(error, DataLoss)
            assert error.check == expected.check
        if expected.error is None:
            first_life.pool.free(way.take(1).blocks, "sequence")
        if expected.by_lease:
            assert not first_life.all_free()
            first_life.alarms.advance(LEASE_S)
            assert first_life.all_free()
        await asyncio.wait_for(first_life.emptied(), 10)
        await one_end_is_counted(first_life, expected)
        assert all(cache.running == 0 for cache in way.caches)
        messages = list(way.script.sent)
        if fault is Fault.RECEIVER_DIES:
            await way.restart_reader()
        if expected.error is not None:
            await late_messages_are_refused(way, messages)
        way.script.heal()
        await way.lands(2, REBORN_WRITER if fault is Fault.SENDER_DIES else WRITER)


async def one_end_is_counted(reader: FakeReader, expected: End) -> None:
    counted = reader.receiver.counters()
    ends = {"failed": counted.failed, "committed": counted.committed}
    assert ends == {"failed": 0, "committed": 0} | ({expected.counted: 1} if expected.counted else {})
    assert counted.expired == (expected.by_lease or expected.error is UnknownHandoff)


def test_every_step_and_fault_is_in_the_table_or_said_not_to_be() -> None:
    every = {(step, fault) for step in Step for fault in Fault}
    assert len(CHUNK_STEPS) == CHUNKS
    assert TABLE.keys() | AFTER | CANT_BE.keys() == every
    assert not TABLE.keys() & CANT_BE.keys()
    assert not TABLE.keys() & AFTER
    assert {wire: sum(cell.values[0] == wire for cell in CELLS) for wire in FULL} == dict.fromkeys(
        FULL, len(every) - len(AFTER) - len(CANT_BE)
    )


@pytest.fixture(params=ALL_WIRES)
async def landed(request: pytest.FixtureRequest) -> AsyncIterator[Road]:
    """A handoff that committed; another one lands after whatever the test did."""
    async with road(request.param) as way:
        await way.hand_over(1)
        yield way
        assert way.reader.all_free()
        await way.lands(2, way.writer)


async def test_after_commit_a_push_that_comes_twice_is_fenced_and_the_first_stands(landed: Road) -> None:
    parts = list(landed.script.sent)
    if landed.proxy is not None:
        assert await landed.proxy.replay(parts) is grpc.StatusCode.ABORTED
    else:
        with pytest.raises(Fenced, match="sent once"):
            await landed.wire.port.push(stream(parts))
    landed.reader.pool.free(landed.take(1).blocks, "sequence")
    with pytest.raises(Fenced, match="taken by Decode before"):
        landed.take(1)


@pytest.mark.parametrize("name", ALL_WIRES)
async def test_after_commit_reordered_an_order_that_overtakes_the_commit_is_refused_and_works_later(
    name: str,
) -> None:
    async with road(name, Step.COMMIT, Fault.STALLED) as way:
        handing = asyncio.ensure_future(way.hand_over(1))
        await way.script.reached.wait()
        with pytest.raises(UnknownHandoff, match="isn't committed"):
            way.take(1)
        way.script.go.set()
        await handing
        way.reader.pool.free(way.take(1).blocks, "sequence")
        assert way.reader.all_free()


async def test_after_commit_a_corrupted_order_is_refused_and_the_handoff_waits_for_the_right_one(
    landed: Road,
) -> None:
    terms = landed.terms(1)
    with pytest.raises(Fenced, match="token_ids"):
        landed.reader.receiver.take(terms.handoff_id, READER, (*terms.token_ids, FIRST_TOKEN_ID ^ 1))
    landed.reader.pool.free(landed.take(1).blocks, "sequence")


async def test_after_commit_an_order_that_stalls_past_the_lease_finds_nothing(landed: Road) -> None:
    landed.reader.alarms.advance(LEASE_S)
    assert landed.reader.all_free()
    with pytest.raises(UnknownHandoff, match="lease expired"):
        landed.take(1)
    assert landed.reader.receiver.counters() == replace(
        ReceiverCounters(),
        committed=1,
        expired=1,
        landed_bytes=landed.reader.receiver.counters().landed_bytes,
    )


@pytest.mark.parametrize("name", ALL_WIRES)
async def test_a_commit_whose_answer_and_release_are_both_lost_is_freed_by_its_lease(name: str) -> None:
    async with road(name, Step.AFTER, Fault.SENDER_DIES) as way:
        with pytest.raises(Unavailable):
            await way.hand_over(1)
        assert not way.reader.all_free()
        way.reader.alarms.advance(LEASE_S)
        assert way.reader.all_free()
        counters = way.reader.receiver.counters()
        assert (counters.committed, counters.expired, counters.failed) == (1, 1, 0)
        way.script.heal()
        await way.lands(2)


async def test_after_commit_a_sender_that_dies_takes_nothing_with_it(landed: Road) -> None:
    await landed.sender(REBORN_WRITER).pair(READER)
    landed.reader.pool.free(landed.take(1).blocks, "sequence")
    landed.writer = REBORN_WRITER


@pytest.mark.parametrize("name", ALL_WIRES)
async def test_after_commit_a_receiver_that_dies_is_another_life_that_knows_nothing(name: str) -> None:
    async with road(name) as way:
        await way.hand_over(1)
        old = way.reader
        old.receiver.close()
        assert old.all_free()
        await way.restart_reader()
        terms = way.terms(1)
        with pytest.raises(Fenced, match="is meant"):
            way.reader.receiver.take(terms.handoff_id, old.life, order_of(terms))
        with pytest.raises(UnknownHandoff, match="never reserved"):
            way.take(1)
        await way.lands(2)


async def test_after_commit_a_request_that_is_cancelled_frees_the_handoff(landed: Road) -> None:
    handoff_id = landed.terms(1).handoff_id
    assert await landed.port.release(handoff_id, "cancelled") is HandoffState.COMMITTED
    with pytest.raises(UnknownHandoff, match="cancelled"):
        landed.take(1)


def test_what_is_left_behind_is_noticed() -> None:
    before = holdings()
    read = open("/proc/self/stat")  # noqa: SIM115
    assert holdings() - before
    read.close()
    assert not holdings() - before
