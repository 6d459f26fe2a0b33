"""Runs one worker on an event loop in a thread of its own, for shells that bring no loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff.status import status_to_bytes

logger = logging.getLogger(__name__)


class Worker(Protocol):
    """What a shell needs of a worker, prefill or decode."""

    async def start(self) -> str:
        """Serves, registers, gives the advertised host:port."""

    async def drain(self) -> int:
        """Takes no new work from now on; requests that still run."""

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends everything that `start` began. Running calls get some seconds, or with `at_once` an error."""

    def alive(self) -> bool:
        """Whether it still computes."""


class WorkerHost:
    """Owns the thread and the loop of one worker from `start` to `stop`."""

    def __init__(self, build: Callable[[], Worker]) -> None:
        self._build = build
        self._serving: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._worker: Worker | None = None
        self._thread = threading.Thread(target=self._run, name="kvpact-worker", daemon=True)

    def start(self) -> None:
        """Begins to build and serve; `report` tells how it went. Not twice."""
        self._thread.start()

    def report(self) -> str | bytes:
        """Waits until the worker serves: its advertised host:port, or the status of what kept it from that.

        A status is bytes of google.rpc.Status, so that an error keeps its class and facts across processes.
        """
        try:
            return self._serving.result()
        except KvpactError as error:
            return status_to_bytes(error)
        except Exception as error:
            return status_to_bytes(KvpactError(f"{type(error).__name__}: {error}"))

    def alive(self) -> bool:
        """False once the worker failed to start, ended, or can't compute any more."""
        return self._thread.is_alive() and (self._worker is None or self._worker.alive())

    def drain(self) -> int:
        """Takes no new work from now on; requests that still run."""
        if self._worker is None:
            raise Unavailable("the worker is not serving")
        return asyncio.run_coroutine_threadsafe(self._worker.drain(), self._loop).result()

    def stop(self) -> None:
        """Ends the worker and joins its thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            self._worker = self._build()
            endpoint = await self._worker.start()
        except Exception as error:
            logger.exception("the worker could not start")
            self._serving.set_exception(error)
            if self._worker is not None:
                await self._worker.stop()
            return
        self._serving.set_result(endpoint)
        await self._stopped.wait()
        await self._worker.stop()
