"""Gives handoffs up in the background, so that no request waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from coordinator.fleet import Fleet
from coordinator.ports import RegisteredWorker
from kvpact.errors import KvpactError
from kvpact.types import HandoffId

logger = logging.getLogger(__name__)


class Releases:
    """Owns the tasks of releases that are under way."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    def give_up(self, workers: Iterable[RegisteredWorker], handoff_id: HandoffId, reason: str) -> None:
        """Begins to release a handoff on these workers."""
        for worker in workers:
            task = asyncio.create_task(self._release(worker, handoff_id, reason), name="release")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Returns when none is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _release(self, worker: RegisteredWorker, handoff_id: HandoffId, reason: str) -> None:
        try:
            await self._fleet.port(worker.life).release(handoff_id, reason)
        except KvpactError as error:
            logger.info("handoff %s ends by its lease on %s: %s", handoff_id.hex(), worker.life.worker, error)
