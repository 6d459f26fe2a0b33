"""Jobs of a lane run one at a time and in order; a failure ends the rest."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpact.errors import DataLoss
from kvpact.handoff.lane import Lane


async def test_jobs_run_one_at_a_time_and_in_order() -> None:
    lane, seen, running = Lane(None), [], 0

    def job(number: int) -> int:
        nonlocal running
        running += 1
        assert running == 1
        seen.append(number)
        running -= 1
        return number

    results = await asyncio.gather(*(lane.put(lambda number=number: job(number)) for number in range(50)))
    assert results == seen == list(range(50))


async def test_room_waits_until_fewer_jobs_are_left() -> None:
    lane, gate = Lane(None), threading.Event()
    first, second = lane.put(lambda: gate.wait(10)), lane.put(lambda: None)
    await lane.room(3)
    waiting = asyncio.ensure_future(lane.room(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    await waiting
    assert first.done()
    assert second.done()


async def test_room_does_not_starve_the_loop_while_results_are_on_their_way() -> None:
    lane = Lane(None)
    for _ in range(200):
        await lane.room(1)
        lane.put(lambda: None)
    await lane.room(1)


async def test_a_job_that_fails_keeps_later_ones_from_running() -> None:
    lane, ran = Lane(None), []

    def fail() -> None:
        raise DataLoss("a lie", check="checksum")

    failed, after = lane.put(fail), lane.put(lambda: ran.append(1))
    for outcome in (failed, after):
        with pytest.raises(DataLoss, match="a lie"):
            await outcome
    with pytest.raises(DataLoss, match="a lie"):
        await lane.room(9)
    assert ran == []


async def test_the_end_drops_what_waits_and_waits_for_what_runs() -> None:
    lane, gate, ran = Lane(None), threading.Event(), []
    running = lane.put(lambda: gate.wait(10))
    dropped = lane.put(lambda: ran.append(1))
    ending = asyncio.ensure_future(lane.end())
    await asyncio.sleep(0)
    assert not ending.done()
    gate.set()
    await ending
    assert running.done()
    assert dropped.cancelled()
    assert ran == []


async def test_a_brief_job_runs_at_once_on_the_loop_unless_others_come_before() -> None:
    lane, gate = Lane(None), threading.Event()
    loop, ran_on = threading.current_thread(), []

    def look() -> None:
        ran_on.append(threading.current_thread())

    assert lane.put(look, brief=True).done()
    assert ran_on == [loop]
    held, behind = lane.put(lambda: gate.wait(10)), lane.put(look, brief=True)
    assert not behind.done()
    gate.set()
    await asyncio.gather(held, behind)
    assert ran_on[1:] != [loop]
    assert lane.put(look, brief=True).done()
    assert ran_on[2:] == [loop]


async def test_a_brief_job_that_fails_keeps_later_ones_from_running() -> None:
    lane, ran = Lane(None), []

    def fail() -> None:
        raise DataLoss("a lie", check="checksum")

    for outcome in (lane.put(fail, brief=True), lane.put(lambda: ran.append(1), brief=True)):
        with pytest.raises(DataLoss, match="a lie"):
            await outcome
    with pytest.raises(DataLoss, match="a lie"):
        await lane.room(1)
    assert ran == []
