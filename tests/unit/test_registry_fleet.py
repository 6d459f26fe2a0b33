"""The fleet pairs, tries again, and forgets; in process, by a transport that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from coordinator.fleet import MOST_WORKERS, QUARANTINE_S, SETTLING_S, SILENCE_S, Fleet, pairing_delay_s
from coordinator.ports import RegisteredWorker, Stream
from kvpact.clock import ManualClock
from kvpact.errors import DataLoss, Exhausted, Unavailable
from kvpact.handoff.jobs import (
    DecodedTokens,
    DecodeJob,
    GenerateJob,
    Paired,
    Partner,
    PrefillEvent,
    PrefillJob,
)
from kvpact.handoff.messages import CanaryOutcome, WorkerDescription
from kvpact.metrics import Metrics
from kvpact.types import HandoffId, Role, VerdictWord
from tests.coordinator_fakes import make_life, make_load, make_verdict
from tests.factories import make_contract


class ScriptedPort:
    """Both roles' port: answers Connect, counts, notices its end."""

    def __init__(self, transport: ScriptedTransport) -> None:
        self._transport = transport
        self.closed = False

    async def connect(self, decode: Partner) -> Paired:
        self._transport.connects.append(decode.life.worker)
        if self._transport.faults:
            raise self._transport.faults.pop(0)
        return Paired(verdict=self._transport.verdict, canary=self._transport.canary)

    def prefill(self, job: PrefillJob) -> Stream[PrefillEvent]:
        raise AssertionError("no request is made here")

    def decode(self, job: DecodeJob) -> Stream[DecodedTokens]:
        raise AssertionError("no request is made here")

    def generate(self, job: GenerateJob) -> Stream[DecodedTokens]:
        raise AssertionError("no request is made here")

    async def release(self, handoff_id: HandoffId, reason: str) -> None:
        raise AssertionError("no request is made here")

    async def drain(self) -> int:
        raise NotImplementedError

    async def describe(self) -> WorkerDescription:
        raise AssertionError("nobody asks here")

    async def close(self) -> None:
        self.closed = True


class ScriptedTransport:
    """Opens ports and keeps them."""

    def __init__(self) -> None:
        self.connects: list[str] = []
        self.faults: list[Exception] = []
        self.canary: CanaryOutcome | None = None
        self.verdict = make_verdict()
        self.ports: list[ScriptedPort] = []

    def prefill_port(self, endpoint: str) -> ScriptedPort:
        self.ports.append(ScriptedPort(self))
        return self.ports[-1]

    def decode_port(self, endpoint: str) -> ScriptedPort:
        return self.prefill_port(endpoint)


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(transport: ScriptedTransport, clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(transport, clock, Metrics("m"), delay_s=lambda failures: 0.0)
    fleet.start()
    yield fleet
    await fleet.stop()


def worker(name: str, life: int = 1) -> RegisteredWorker:
    """p... is a prefill worker, d... a decode worker."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return RegisteredWorker(
        life=make_life(name, life), role=role, endpoint=f"{name}:1", contract=make_contract(), pid=1
    )


def usable(fleet: Fleet) -> list[tuple[str, str]]:
    """Names of the pairs that may be used."""
    return [(p.key.prefill.worker, p.key.decode.worker) for p in fleet.snapshot().pairs if p.usable()]


async def until(fleet: Fleet, pairs: int) -> None:
    """Waits until this many pairs are usable."""
    while len(usable(fleet)) != pairs:
        await fleet.change()


async def test_all_workers_are_paired_whatever_the_order(fleet: Fleet) -> None:
    for name in ("d1", "p1", "d2", "p2"):
        fleet.register(worker(name), make_load())
    await until(fleet, 4)


async def test_pairing_is_tried_again_until_both_can_be_reached(
    fleet: Fleet, transport: ScriptedTransport
) -> None:
    transport.faults += [Unavailable("not yet")] * 3
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    assert transport.connects == ["d"] * 4


async def test_a_suspected_pair_is_out_of_use_until_it_is_paired_anew(
    fleet: Fleet, transport: ScriptedTransport
) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    fleet.suspect(fleet.snapshot().pairs[0].key, Unavailable("reset"))
    assert usable(fleet) == []
    await until(fleet, 1)
    assert len(transport.connects) == 2


async def test_a_new_life_closes_the_port_of_the_old_one(fleet: Fleet, transport: ScriptedTransport) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    fleet.register(worker("d", life=2), make_load())
    await until(fleet, 1)
    assert [port.closed for port in transport.ports] == [False, True, False]
    with pytest.raises(Unavailable, match="d is gone"):
        fleet.decode_port(make_life("d"))


async def test_a_silent_worker_is_forgotten_and_must_register_again(
    fleet: Fleet, transport: ScriptedTransport, clock: ManualClock
) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    clock.advance(SILENCE_S)
    assert fleet.heartbeat(make_life("p"), make_load())
    clock.advance(1.0)
    fleet.expire_silent()
    assert usable(fleet) == []
    assert not fleet.heartbeat(make_life("d"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)


async def test_a_defect_while_pairing_leaves_no_pair_without_a_verdict(
    fleet: Fleet, transport: ScriptedTransport
) -> None:
    transport.faults += [RuntimeError("a defect"), ValueError("another")]
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    async with asyncio.timeout(5):
        await until(fleet, 1)
    assert transport.connects == ["d"] * 3


async def test_the_watch_goes_on_after_a_defect(
    transport: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OddClock(ManualClock):
        faults = 0

        def now(self) -> float:
            if self.faults:
                self.faults -= 1
                raise RuntimeError("a defect")
            return super().now()

    monkeypatch.setattr("coordinator.fleet.HEARTBEAT_INTERVAL_S", 0.0)
    clock = OddClock()
    fleet = Fleet(transport, clock, Metrics("m"), delay_s=lambda failures: 0.0)
    fleet.register(worker("p"), make_load())
    clock.advance(SILENCE_S + 1.0)
    clock.faults = 2
    fleet.start()
    async with asyncio.timeout(5):
        while fleet.snapshot().workers:
            await fleet.change()
    await fleet.stop()


async def test_a_pair_in_quarantine_is_paired_anew_after_a_while(
    fleet: Fleet, transport: ScriptedTransport, clock: ManualClock
) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    key = fleet.snapshot().pairs[0].key
    fleet.quarantine(key, DataLoss("chunk 3", check="checksum"))
    fleet.suspect(key, Unavailable("reset"))
    keep_alive(fleet, clock, QUARANTINE_S - 1.0)
    assert (usable(fleet), transport.connects) == ([], ["d"])
    assert [task for task in asyncio.all_tasks() if task.get_name() == "pairing"] == []
    keep_alive(fleet, clock, 1.0)
    await until(fleet, 1)
    assert transport.connects == ["d", "d"]


async def test_a_new_life_ends_a_quarantine(fleet: Fleet, transport: ScriptedTransport) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    fleet.quarantine(fleet.snapshot().pairs[0].key, DataLoss("chunk 3", check="checksum"))
    fleet.register(worker("d", life=2), make_load())
    await until(fleet, 1)


async def test_a_pair_that_fails_its_probe_is_tried_again_after_the_quarantine_only(
    fleet: Fleet, transport: ScriptedTransport, clock: ManualClock
) -> None:
    transport.faults += [DataLoss("off by 3", check="canary")]
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "pairing"))
    assert [pair.word() for pair in fleet.snapshot().pairs] == ["quarantined"]
    assert transport.connects == ["d"]
    keep_alive(fleet, clock, QUARANTINE_S)
    await until(fleet, 1)


async def test_another_contract_of_the_same_life_is_paired_anew(
    fleet: Fleet, transport: ScriptedTransport
) -> None:
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    await until(fleet, 1)
    other = worker("d")
    fleet.register(replace(other, contract=make_contract(block_size=32)), make_load())
    assert usable(fleet) == []
    await until(fleet, 1)
    assert transport.connects == ["d", "d"]
    assert [port.closed for port in transport.ports] == [False, True, False]


def keep_alive(fleet: Fleet, clock: ManualClock, seconds: float) -> None:
    """Lets time pass in which both workers beat, and the fleet looks after itself."""
    clock.advance(seconds)
    for name in ("p", "d"):
        assert fleet.heartbeat(make_life(name), make_load())
    fleet.expire_silent()
    fleet.pair_due()


async def test_pairing_ends_when_one_of_the_two_is_gone(
    fleet: Fleet, transport: ScriptedTransport, clock: ManualClock
) -> None:
    transport.faults += [Unavailable("down")] * 1000
    fleet.register(worker("p"), make_load())
    fleet.register(worker("d"), make_load())
    clock.advance(SILENCE_S + 1.0)
    fleet.expire_silent()
    pairing = [task for task in asyncio.all_tasks() if task.get_name() == "pairing"]
    await asyncio.gather(*pairing)
    assert len(transport.connects) < 1000


def test_the_fleet_settles_for_a_while_after_a_change_and_then_rests(clock: ManualClock) -> None:
    fleet = Fleet(ScriptedTransport(), clock, Metrics("m"))
    assert fleet.settling_s() == 0.0
    fleet.register(worker("p"), make_load())
    clock.advance(SETTLING_S / 4)
    assert fleet.settling_s() == SETTLING_S * 3 / 4
    clock.advance(SETTLING_S)
    assert fleet.settling_s() == 0.0


def test_delays_between_tries_grow_to_a_bound() -> None:
    assert [pairing_delay_s(n) for n in (1, 2, 3, 20)] == [0.1, 0.2, 0.4, 10.0]


async def test_more_workers_than_a_cluster_has_are_turned_away_and_known_ones_are_not(fleet: Fleet) -> None:
    for number in range(MOST_WORKERS):
        fleet.register(worker(f"d{number}"), make_load())
    with pytest.raises(Exhausted, match="1024 workers"):
        fleet.register(worker("d-late"), make_load())
    fleet.register(worker("d0", life=2), make_load())
    assert len(fleet.snapshot().workers) == MOST_WORKERS


@pytest.mark.parametrize("another_works", [True, False])
async def test_a_refused_pair_beside_one_that_works_is_a_warning(
    fleet: Fleet, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture, another_works: bool
) -> None:
    if another_works:
        fleet.register(worker("p1"), make_load())
        fleet.register(worker("d1"), make_load())
        while not usable(fleet):
            await fleet.change()
    transport.verdict = make_verdict(VerdictWord.REJECT, fields=["inv_freq"])
    fleet.register(worker("p2"), make_load())
    fleet.register(worker("d2"), make_load())
    while not all(pair.settled() for pair in fleet.snapshot().pairs):
        await fleet.change()
    assert ("p2 with d2 get no requests: they differ in inv_freq" in caplog.text) == another_works
