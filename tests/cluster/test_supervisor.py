"""Actors that a supervisor starts, ends while they start, and keeps clients' keys from."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import ray

from coordinator.supervisor import Supervisor
from kvpact.cli.joining import init_ray
from kvpact.cli.signals import handlers_kept
from kvpact.config import Config, parse_config
from kvpact.errors import Unavailable
from kvpact.types import Role

SLOW, BROKEN = "decode-2", "decode-3"
CONFIG = Config.model_validate(
    {"model": "x", "api": {"port": 1, "api_keys": ["of-a-user"], "admin_keys": ["of-an-operator"]}}
)


class Shell:
    """A worker whose endpoint is what it was made with."""

    def __init__(self, settings: dict[str, object], worker: str, coordinator: str) -> None:
        self._made = json.dumps({"settings": settings, "worker": worker, "coordinator": coordinator})
        self._worker = worker

    def report(self) -> str:
        if self._worker == SLOW:
            threading.Event().wait(60.0)
        if self._worker == BROKEN:
            ray.actor.exit_actor()
        return self._made

    def stop(self) -> None:
        """Nothing to end."""

    @ray.method(concurrency_group="health")
    def healthy(self) -> bool:
        return True


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with handlers_kept():
        init_ray(address="local", num_cpus=2, include_dashboard=False)
        yield
        ray.shutdown()


@pytest.fixture
async def supervisor(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    monkeypatch.setattr("coordinator.supervisor.STOP_DEADLINE_S", 1.0)
    actor = ray.remote(max_restarts=0, concurrency_groups={"health": 1})(Shell)
    supervisor = Supervisor(CONFIG, {Role.PREFILL: actor, Role.DECODE: actor})
    yield supervisor
    await supervisor.stop()


async def test_workers_get_every_setting_but_the_keys_of_clients(supervisor: Supervisor) -> None:
    made = json.loads((await supervisor.start("c:1"))["prefill-0"])
    assert (made["worker"], made["coordinator"]) == ("prefill-0", "c:1")
    without = CONFIG.api.model_copy(update={"api_keys": (), "admin_keys": ()})
    assert parse_config(made["settings"]) == CONFIG.model_copy(update={"api": without})


async def test_a_worker_that_is_ended_while_it_starts_holds_up_no_other(supervisor: Supervisor) -> None:
    await supervisor.start("c:1")
    growing = asyncio.create_task(supervisor.grow(Role.DECODE, 3))
    await asyncio.sleep(0)
    assert supervisor.of_role(Role.DECODE)[2:] == [SLOW]
    await supervisor.end(SLOW)
    assert list(await growing) == ["decode-1"]
    assert supervisor.owns("decode-1")
    assert not supervisor.owns(SLOW)


async def test_one_that_dies_while_it_starts_is_told_and_the_others_go_on(supervisor: Supervisor) -> None:
    await supervisor.start("c:1")
    slow = asyncio.create_task(supervisor.grow(Role.DECODE, 3))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=BROKEN):
        await supervisor.grow(Role.DECODE, 4)
    assert [supervisor.owns(name) for name in ("decode-0", "decode-1", SLOW, BROKEN)] == [True] * 3 + [False]
    await supervisor.end(SLOW)
    assert list(await slow) == ["decode-1"]
