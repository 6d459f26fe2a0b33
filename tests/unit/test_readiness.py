"""Who knows that a worker is of no use now: the router, the coordinator's book, its health service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.fleet import Fleet
from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, Registry
from coordinator.router import choose_pair, obstacle_of
from coordinator.service import CoordinatorServer
from kvpact.clock import ManualClock
from kvpact.config import RoleConfig
from kvpact.errors import Unavailable
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.handoff.security_transport import PLAINTEXT
from kvpact.metrics import Metrics
from kvpact.serving.worker_transport import WorkerFront
from kvpact.types import (
    ContractDigest,
    HandoffId,
    Role,
    Verdict,
    VerdictWord,
    WorkerCounters,
    WorkerLife,
)
from tests.coordinator_fakes import make_life, make_load, make_verdict
from tests.factories import make_contract
from tests.unit.test_registry_fleet import ScriptedPort, ScriptedTransport

PREFILL, DECODE = make_life("p"), make_life("d")
KEY = PairKey(PREFILL, DECODE)


def worker(life: WorkerLife) -> RegisteredWorker:
    role = Role.PREFILL if life == PREFILL else Role.DECODE
    return RegisteredWorker(life=life, role=role, endpoint="h:1", contract=make_contract(), pid=1)


def pair_of_workers() -> Registry:
    registry = Registry()
    for life in (PREFILL, DECODE):
        registry.register(worker(life), make_load(), 0.0)
    return registry


def drain_prefill(registry: Registry) -> None:
    registry.set_draining(PREFILL, True)


def refuse(registry: Registry) -> None:
    registry.record_verdict(KEY, make_verdict(VerdictWord.REJECT, fields=["inv_freq"]))


def quarantine(registry: Registry) -> None:
    registry.quarantine(KEY, "the pair's probe failed", 30.0)


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda registry: None, "pairing is under way"),
        (refuse, "no prefill worker can share a cache with it: they differ in inv_freq"),
        (quarantine, "in quarantine: the pair's probe failed"),
        (drain_prefill, "no prefill worker takes requests now: p is draining"),
        (lambda registry: registry.set_draining(DECODE, True), "d takes no new work"),
    ],
)
def test_a_worker_without_a_usable_pair_is_told_why(happens: Callable[[Registry], None], why: str) -> None:
    registry = pair_of_workers()
    happens(registry)
    assert why in obstacle_of(registry.snapshot(), DECODE)


def test_a_request_is_told_who_drains_and_how_to_start_another_or_that_there_is_none() -> None:
    registry = pair_of_workers()
    registry.set_draining(DECODE, True)
    remedy = r"d is draining; start another \(kvpact scale --decode N, where `kvpact up` started it\)"
    with pytest.raises(Unavailable, match=remedy):
        choose_pair(registry.snapshot())
    registry.forget(DECODE)
    with pytest.raises(Unavailable, match="now; start one, or wait until one has registered"):
        choose_pair(registry.snapshot())


@pytest.mark.parametrize("draining", [True, False])
async def test_a_worker_that_falls_silent_while_it_drains_has_ended(
    draining: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = ManualClock()
    fleet = Fleet(ScriptedTransport(), clock, Metrics("m"))
    fleet.register(worker(DECODE), make_load(draining=draining))
    clock.advance(6.0)
    fleet.expire_silent()
    assert fleet.lives() == []
    assert ("d has ended" in caplog.text) == draining
    assert ("d has been silent for 5 s" in caplog.text) == (not draining)
    await fleet.stop()


@pytest.mark.parametrize("word", [VerdictWord.ACCEPT, VerdictWord.CONVERT])
def test_one_usable_pair_is_enough(word: VerdictWord) -> None:
    registry = pair_of_workers()
    other = make_life("d2")
    registry.register(worker(other), make_load(), 0.0)
    refuse(registry)
    registry.record_verdict(PairKey(PREFILL, other), make_verdict(word))
    assert obstacle_of(registry.snapshot(), other) == ""
    assert obstacle_of(registry.snapshot(), PREFILL) == ""
    assert "inv_freq" in obstacle_of(registry.snapshot(), DECODE)


def test_a_beat_from_before_the_order_doesn_t_put_a_draining_worker_back_to_work() -> None:
    registry = pair_of_workers()
    assert registry.set_draining(DECODE, True)
    assert not registry.set_draining(DECODE, True)
    registry.heartbeat(DECODE, make_load(draining=False), 1.0)
    assert registry.snapshot().of_role(Role.DECODE) == []
    registry.register(worker(make_life("d", 2)), make_load(), 2.0)
    assert len(registry.snapshot().of_role(Role.DECODE)) == 1


def test_a_pair_with_a_draining_worker_isn_t_paired_anew() -> None:
    registry = pair_of_workers()
    assert registry.unpaired(0.0) == [KEY]
    registry.set_draining(DECODE, True)
    assert registry.unpaired(0.0) == []


class DrainedPort(ScriptedPort):
    """Tells what the fleet says of its worker while the order is on its way."""

    def __init__(self, transport: DrainingTransport) -> None:
        super().__init__(transport)
        self._draining = transport

    async def drain(self) -> int:
        self._draining.seen.append([state.worker.life for state in self._draining.taking_work()])
        if self._draining.away:
            raise Unavailable("can't reach d")
        return 3


class DrainingTransport(ScriptedTransport):
    away = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[WorkerLife]] = []
        self.fleet: Fleet | None = None

    def taking_work(self) -> list[object]:
        assert self.fleet is not None
        return list(self.fleet.snapshot().of_role(Role.DECODE))

    def prefill_port(self, endpoint: str) -> ScriptedPort:
        self.ports.append(DrainedPort(self))
        return self.ports[-1]


@pytest.mark.parametrize("away", [False, True])
async def test_a_worker_gets_nothing_from_the_moment_its_drain_is_ordered(away: bool) -> None:
    transport = DrainingTransport()
    transport.away = away
    transport.fleet = fleet = Fleet(transport, ManualClock(), Metrics("m"))
    fleet.register(worker(DECODE), make_load())
    if away:
        with pytest.raises(Unavailable):
            await fleet.drain(DECODE)
    else:
        assert await fleet.drain(DECODE) == 3
    assert transport.seen == [[]]
    assert len(transport.taking_work()) == (1 if away else 0)
    await fleet.stop()


class Facts:
    """A decode worker that only describes itself."""

    def __init__(self) -> None:
        self.load = make_load()

    def description(self) -> WorkerDescription:
        return WorkerDescription(
            life=DECODE,
            role=Role.DECODE,
            contract=make_contract(),
            counters=WorkerCounters(),
            load=self.load,
            pid=1,
        )

    async def describe(self) -> WorkerDescription:
        return self.description()

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        raise AssertionError("nobody asks here")

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        raise AssertionError("nobody asks here")

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        raise AssertionError("nobody asks here")

    async def drain(self) -> int:
        raise AssertionError("nobody asks here")


@asynccontextmanager
async def served(facts: Facts, coordinator: str | None) -> AsyncIterator[tuple[WorkerFront, str]]:
    front = WorkerFront(
        facts=facts,
        role=RoleConfig(),
        add_service=lambda server: None,
        coordinator=coordinator,
        security=PLAINTEXT,
    )
    endpoint = await front.start()
    try:
        yield front, endpoint
    finally:
        await front.stop()


async def health(endpoint: str) -> tuple[bool, bool]:
    """Whether it lives, and whether it is ready."""
    serving = health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(endpoint) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", "kvpact.ready")]
        live, ready = [(await ask(request)).status == serving for request in requests]
    return live, ready


async def known(fleet: Fleet) -> None:
    while fleet.role_of(DECODE) is None:
        await fleet.change()


async def test_a_worker_s_readiness_follows_what_its_coordinator_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    facts, fleet = Facts(), Fleet(ScriptedTransport(), ManualClock(), Metrics("m"))
    server = CoordinatorServer(fleet, PLAINTEXT)
    coordinator = await server.start("127.0.0.1", 0)
    async with served(facts, coordinator) as (front, endpoint):
        assert await health(endpoint) == (True, False)
        await asyncio.wait_for(known(fleet), 10)
        await front.announce()
        assert await health(endpoint) == (True, False)
        assert "not ready: no prefill worker takes requests now" in caplog.text
        changed = fleet.change()
        fleet.register(worker(PREFILL), make_load())
        await changed
        while not all(pair.usable() for pair in fleet.snapshot().pairs):
            await fleet.change()
        await front.announce()
        assert await health(endpoint) == (True, True)
        await front.leave()
        facts.load = replace(facts.load, draining=True)
        await front.announce()
        assert await health(endpoint) == (True, False)
        assert fleet.snapshot().of_role(Role.DECODE) == []
        assert caplog.text.count("not ready: ") == 1
    await server.stop()
    await fleet.stop()


async def test_a_worker_whose_coordinator_is_away_isn_t_ready_and_one_that_has_none_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(Facts(), None) as (_, endpoint):
        assert await health(endpoint) == (True, True)
    async with served(Facts(), "127.0.0.1:9") as (front, endpoint):
        await front.announce()
        assert await health(endpoint) == (True, False)
    assert "not ready: its coordinator doesn't answer" in caplog.text
