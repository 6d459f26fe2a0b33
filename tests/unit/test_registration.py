"""What a worker's log says: of a coordinator that is away, and of its own end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from kvpact.clock import ManualClock
from kvpact.config import Config
from kvpact.serving.registration_transport import Registrar, registration_delay_s
from kvpact.serving.repeats import Repeats
from kvpact.serving.standalone import run_worker
from kvpact.types import Role
from tests.coordinator_fakes import make_life, make_load
from tests.factories import make_contract

NOBODY = "127.0.0.1:9"


def test_the_same_words_are_news_once_and_again_after_a_minute_or_a_change() -> None:
    clock = ManualClock()
    repeats = Repeats(clock)
    assert [repeats.is_news("away") for _ in range(3)] == [True, False, False]
    assert [repeats.is_news(text) for text in ("refused", "refused", "away")] == [True, False, True]
    clock.advance(59.0)
    assert not repeats.is_news("away")
    clock.advance(1.0)
    assert [repeats.is_news("away") for _ in range(2)] == [True, False]
    repeats.is_over()
    assert repeats.is_news("away")


def test_tries_get_further_apart_up_to_some_seconds() -> None:
    assert [registration_delay_s(failures) for failures in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


class Obstacles:
    """Counts how often a worker was told why no request reaches it."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()

    async def note(self, obstacle: str) -> None:
        self.count += 1
        self.changed.set()

    async def until(self, count: int) -> None:
        while self.count < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)


@pytest.mark.parametrize(("minutes", "said"), [(0, 1), (1, 2)])
async def test_a_coordinator_that_stays_away_is_told_once_and_tried_on(
    minutes: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock, obstacles, failures = ManualClock(), Obstacles(), []

    def delay_s(count: int) -> float:
        failures.append(count)
        return 0.01

    registrar = Registrar(
        coordinator=NOBODY,
        life=make_life("decode-0"),
        role=Role.DECODE,
        endpoint="h:1",
        contract=make_contract(),
        load=make_load,
        on_obstacle=obstacles.note,
        clock=clock,
        delay_s=delay_s,
    )
    registrar.start()
    await obstacles.until(3)
    clock.advance(60.0 * minutes)
    await obstacles.until(6)
    await registrar.stop()
    assert failures[:5] == [1, 2, 3, 4, 5]
    assert caplog.text.count("announcing this worker failed") == said
    assert "it is tried again until it works" in caplog.text


class Interrupted:
    """A worker that gets SIGTERM once it serves, and has one request to finish."""

    def __init__(self) -> None:
        self.left = 1
        self.stopped: list[bool] = []

    async def start(self) -> str:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return "h:1"

    async def drain(self) -> int:
        self.left -= 1
        return self.left + 1

    async def stop(self, *, at_once: bool = False) -> None:
        self.stopped.append(at_once)

    def alive(self) -> bool:
        return True


def test_a_worker_that_is_ended_says_that_it_drains_and_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "argv", ["decode_worker"])
    served = Interrupted()

    def build(config: Config, *, worker: str, coordinator: str | None) -> Interrupted:
        return served

    with pytest.raises(SystemExit) as ended:
        run_worker(Role.DECODE, build)
    assert (ended.value.code, served.stopped) == (0, [False])
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [word for word in said if word in ("draining", "ended")] == ["draining", "ended"]
