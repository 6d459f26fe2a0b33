"""Workers that are started and ended on an operator's order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import cast

import httpx
import pytest

from coordinator.coordinator import Coordinator
from coordinator.fleet import Fleet
from coordinator.ports import RegisteredWorker, Transport
from coordinator.scaling import Scaling
from kvpact.clock import ManualClock
from kvpact.config import ApiConfig, Config
from kvpact.errors import Unavailable
from kvpact.metrics import Metrics
from kvpact.serving.draining import finish
from kvpact.types import Role
from tests.coordinator_fakes import make_life, make_load, make_text_folder
from tests.factories import make_contract


class ListedCrew:
    """A crew that keeps a list."""

    def __init__(self) -> None:
        self.names = {Role.PREFILL: ["prefill-0"], Role.DECODE: ["decode-0", "decode-1"]}
        self.changed = asyncio.Event()
        self.ended: list[str] = []
        self.fails = False

    async def grow(self, role: Role, wanted: int) -> dict[str, str]:
        if self.fails:
            raise Unavailable("no node has room")
        names = self.names[role]
        free = (name for index in count() if (name := f"{role}-{index}") not in names)
        fresh = [next(free) for _ in range(wanted - len(names))]
        names += fresh
        self.changed.set()
        return dict.fromkeys(fresh, "h:1")

    def of_role(self, role: Role) -> list[str]:
        return list(self.names[role])

    def owns(self, name: str) -> bool:
        return any(name in names for names in self.names.values())

    async def end(self, name: str) -> None:
        self.names[Role(name.partition("-")[0])].remove(name)
        self.ended.append(name)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
async def crew() -> ListedCrew:
    return ListedCrew()


@pytest.fixture
async def http(tmp_path: Path, crew: ListedCrew) -> AsyncIterator[httpx.AsyncClient]:
    config = Config(model="fake", api=ApiConfig(port=0))
    coordinator = Coordinator(config, make_text_folder(tmp_path), clock=ManualClock(), crew=crew)
    port, _ = await coordinator.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            yield http
    finally:
        await coordinator.stop()


async def test_roles_grow_and_shrink_to_what_is_asked(http: httpx.AsyncClient, crew: ListedCrew) -> None:
    answer = await http.post("/admin/scale", json={"prefill": 2, "decode": 1})
    assert answer.json() == {"wanted": {"prefill": 2, "decode": 1}, "leaving": ["decode-1"]}
    wanted = {Role.PREFILL: ["prefill-0", "prefill-1"], Role.DECODE: ["decode-0"]}
    await crew.until(lambda: crew.names == wanted)


async def test_a_role_that_is_left_out_stays_and_none_is_too_few(
    http: httpx.AsyncClient, crew: ListedCrew
) -> None:
    assert (await http.post("/admin/scale", json={"decode": 2})).json()["leaving"] == []
    assert (await http.post("/admin/scale", json={"decode": 0})).status_code == 400
    assert crew.names[Role.PREFILL] == ["prefill-0"]


async def test_a_worker_that_can_t_be_started_is_told_in_the_log(
    http: httpx.AsyncClient, crew: ListedCrew, caplog: pytest.LogCaptureFixture
) -> None:
    crew.fails = True
    await http.post("/admin/scale", json={"prefill": 2})
    assert "a prefill worker could not be started: no node has room" in caplog.text


async def test_one_that_leaves_already_isn_t_told_twice(crew: ListedCrew) -> None:
    unused = cast("Transport", None)  # no worker is registered
    fleet = Fleet(unused, ManualClock(), Metrics("x"))
    scaling = Scaling(fleet, crew, drain_s=1.0)
    assert scaling.scale({Role.DECODE: 1}) == ["decode-1"]
    assert scaling.scale({Role.DECODE: 1}) == []
    await scaling.stop()


async def test_workers_that_leave_are_replaced_where_more_are_wanted_meanwhile(crew: ListedCrew) -> None:
    scaling = Scaling(Fleet(cast("Transport", None), ManualClock(), Metrics("x")), crew, drain_s=1.0)
    assert scaling.scale({Role.DECODE: 1}) == ["decode-1"]
    assert scaling.scale({Role.DECODE: 3}) == []
    await crew.until(lambda: bool(crew.ended))
    await crew.until(lambda: len(crew.names[Role.DECODE]) == 3)
    await scaling.stop()


class IdlePorts:
    """A transport to workers that have nothing to do."""

    def decode_port(self, endpoint: str) -> IdlePorts:
        return self

    async def drain(self) -> int:
        return 0

    async def close(self) -> None:
        return None


def decode_worker(name: str) -> RegisteredWorker:
    return RegisteredWorker(
        life=make_life(name), role=Role.DECODE, endpoint="h:1", contract=make_contract(), pid=1
    )


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """Both decode workers of the crew, idle; decode-0 drains."""
    fleet = Fleet(cast("Transport", IdlePorts()), ManualClock(), Metrics("x"))
    for name in ("decode-0", "decode-1"):
        fleet.register(decode_worker(name), make_load())
    await fleet.drain(make_life("decode-0"))
    yield fleet
    await fleet.stop()


async def test_a_drained_worker_leaves_before_a_healthy_one(fleet: Fleet, crew: ListedCrew) -> None:
    scaling = Scaling(fleet, crew, drain_s=1.0)
    assert scaling.scale({Role.DECODE: 1}) == ["decode-0"]
    assert scaling.leaves("decode-0")
    assert not scaling.leaves("decode-1")
    await crew.until(lambda: crew.ended == ["decode-0"])
    assert crew.names[Role.DECODE] == ["decode-1"]
    assert scaling.scale({Role.DECODE: 1}) == []
    await scaling.stop()


async def test_a_drained_worker_is_replaced_where_as_many_as_before_are_wanted(
    fleet: Fleet, crew: ListedCrew
) -> None:
    scaling = Scaling(fleet, crew, drain_s=1.0)
    assert scaling.scale({Role.DECODE: 2}) == ["decode-0"]
    await crew.until(lambda: crew.ended == ["decode-0"])
    await crew.until(lambda: crew.names[Role.DECODE] == ["decode-1", "decode-0"])
    await scaling.stop()


async def test_a_worker_that_was_ended_is_forgotten_at_once_and_its_next_life_isn_t(
    fleet: Fleet, crew: ListedCrew, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scaling = Scaling(fleet, crew, drain_s=1.0)
    scaling.scale({Role.DECODE: 2})
    gone = fleet.change()
    await crew.until(lambda: crew.ended == ["decode-0"])
    await gone
    assert [life.worker for life in fleet.lives()] == ["decode-1"]
    assert "decode-0 has ended" in caplog.text
    fleet.register(replace(decode_worker("decode-0"), life=make_life("decode-0", 2)), make_load())
    fleet.forget(make_life("decode-0"))
    assert {life.worker for life in fleet.lives()} == {"decode-0", "decode-1"}
    await scaling.stop()


class DeafPorts:
    """A transport to workers that don't answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.changed = asyncio.Event()

    def decode_port(self, endpoint: str) -> DeafPorts:
        return self

    async def drain(self) -> int:
        self.asked += 1
        self.changed.set()
        raise Unavailable("no answer in time")

    async def close(self) -> None:
        return None


async def test_one_that_doesn_t_answer_isn_t_ended_while_it_has_requests(crew: ListedCrew) -> None:
    ports = DeafPorts()
    fleet = Fleet(cast("Transport", ports), ManualClock(), Metrics("x"))
    worker = decode_worker("decode-1")
    fleet.register(worker, make_load())
    fleet.assign([worker.life], +1)
    scaling = Scaling(fleet, crew, drain_s=3600.0)
    scaling.scale({Role.DECODE: 1})
    while ports.asked < 2:
        ports.changed.clear()
        await ports.changed.wait()
    assert crew.ended == []
    fleet.assign([worker.life], -1)
    await crew.until(lambda: crew.ended == ["decode-1"])
    await scaling.stop()
    await fleet.stop()


async def test_a_coordinator_without_a_crew_says_so(tmp_path: Path) -> None:
    config = Config(model="fake", api=ApiConfig(port=0))
    coordinator = Coordinator(config, make_text_folder(tmp_path), clock=ManualClock())
    port, _ = await coordinator.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post("/admin/scale", json={"prefill": 2})
    finally:
        await coordinator.stop()
    assert answer.status_code == 400
    assert "aren't started by this coordinator" in answer.text


class Countdown:
    """A worker with some requests, one of which ends each time it is asked."""

    def __init__(self, left: int, *, stuck: bool = False) -> None:
        self.left = left
        self.stuck = stuck
        self.asked = asyncio.Event()

    async def drain(self) -> int:
        left = self.left
        self.left -= 0 if self.stuck else min(1, self.left)
        self.asked.set()
        return left


async def test_finishing_waits_until_nothing_runs() -> None:
    assert await finish(Countdown(2), within_s=30.0, hurry=asyncio.Event()) == 0


async def test_finishing_ends_with_the_time_or_in_a_hurry() -> None:
    hurry = asyncio.Event()
    assert await finish(Countdown(3, stuck=True), within_s=0.0, hurry=hurry) == 3
    stuck = Countdown(3, stuck=True)
    finishing = asyncio.create_task(finish(stuck, within_s=3600.0, hurry=hurry))
    await stuck.asked.wait()
    hurry.set()
    assert await finishing == 3
