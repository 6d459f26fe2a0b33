"""Jobs of one handoff on executor threads: one at a time, in order, without a turn of the loop between."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Job(Generic[T]):
    def __init__(self, run: Callable[[], T], outcome: asyncio.Future[T]) -> None:
        self.run = run
        self.outcome = outcome


class Lane:
    """Used from one event loop. A job that fails makes all later ones fail the same way, without running."""

    def __init__(self, executor: Executor | None) -> None:
        """`executor` None takes the event loop's own."""
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Job[Any]] = deque()
        self._pending: deque[asyncio.Future[Any]] = deque()
        """Outcomes of jobs that may wait or run, oldest first."""
        self._lock = threading.Lock()
        self._running = False
        self._failure: BaseException | None = None

    def put(self, job: Callable[[], T], *, brief: bool = False) -> asyncio.Future[T]:
        """Runs `job` behind those that were put before; the future is never cancelled from here.

        `brief`: the loop can bear to wait for it; where nothing is before it, it runs here and now.
        """
        outcome: asyncio.Future[T] = self._loop.create_future()
        outcome.add_done_callback(_look_at)
        self._forget_done()
        if brief and not self._pending:
            self._settle_here(job, outcome)
            return outcome
        self._pending.append(outcome)
        with self._lock:
            self._waiting.append(_Job(job, outcome))
            start, self._running = not self._running, True
        if start:
            self._loop.run_in_executor(self._executor, self._run)
        return outcome

    async def room(self, most: int) -> None:
        """Returns when fewer than `most` jobs wait or run. Raises what a job raised."""
        self._forget_done()
        while len(self._pending) >= most:
            await asyncio.wait([self._pending[0]])
            self._forget_done()
        if self._failure is not None:
            raise self._failure

    async def end(self) -> None:
        """Drops the jobs that still wait; returns when no thread runs one."""
        with self._lock:
            dropped, self._waiting = self._waiting, deque()
        for job in dropped:
            job.outcome.cancel()
        running = [outcome for outcome in self._pending if not outcome.done()]
        if running:
            await asyncio.wait(running)

    def _forget_done(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft()

    def _settle_here(self, job: Callable[[], T], outcome: asyncio.Future[T]) -> None:
        result = None
        if self._failure is None:
            try:
                result = job()
            except Exception as error:
                self._failure = error
        _settle(outcome, result, self._failure)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                job = self._waiting.popleft()
            result = None
            if self._failure is None:
                try:
                    result = job.run()
                except BaseException as error:
                    self._failure = error
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_settle, job.outcome, result, self._failure)


def _look_at(outcome: asyncio.Future[Any]) -> None:
    """An error that nobody awaits is no news: `room` raises it, or the handoff ended before."""
    if not outcome.cancelled():
        outcome.exception()


def _settle(outcome: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if outcome.done():
        return
    if failure is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(failure)
