"""Changes how many workers there are: new ones start, drained ones and then the youngest are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Protocol

from coordinator.fleet import Fleet
from kvpact.errors import KvpactError
from kvpact.serving.draining import finish
from kvpact.types import Role

logger = logging.getLogger(__name__)


class Crew(Protocol):
    """Whoever starts and ends workers."""

    async def grow(self, role: Role, wanted: int) -> dict[str, str]:
        """Starts workers until there are `wanted`; the new ones with endpoints. Raises KvpactError."""

    def of_role(self, role: Role) -> list[str]:
        """Workers of a role that it started, the oldest first."""

    def owns(self, name: str) -> bool:
        """Whether it started this worker."""

    async def end(self, name: str) -> None:
        """Ends one for good. Raises BadRequest where it isn't its own."""


class Scaling:
    """Owns the tasks that start and end workers. Whatever overlaps, it ends with what was wanted last."""

    def __init__(self, fleet: Fleet, crew: Crew, *, drain_s: float) -> None:
        self._fleet = fleet
        self._crew = crew
        self._drain_s = drain_s
        self._wanted: dict[Role, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()

    def scale(self, wanted: Mapping[Role, int]) -> list[str]:
        """Begins to change to `wanted` workers of each role; the names of those that will leave.

        One that drains doesn't count: it leaves, and another one starts where too few are left.
        """
        self._wanted |= wanted
        leaving = [name for role in wanted for name in self._let_go(role)]
        for role in wanted:
            self._begin(self._grow(role))
        return leaving

    def owns(self, name: str) -> bool:
        """Whether a worker is one of those that it counts."""
        return self._crew.owns(name)

    def leaves(self, name: str) -> bool:
        """Whether a worker is on its way out."""
        return name in self._leaving

    async def stop(self) -> None:
        """Ends what is under way, without waiting for workers' requests. Idempotent."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _let_go(self, role: Role) -> list[str]:
        """Begins to retire workers that drain or are too many, and don't leave already; their names."""
        draining = {life.worker for life in self._fleet.snapshot().draining()}
        staying = [name for name in self._crew.of_role(role) if name not in self._leaving]
        serving = [name for name in staying if name not in draining]
        names = [name for name in staying if name in draining] + serving[self._wanted[role] :][::-1]
        for name in names:
            self._leaving.add(name)
            self._begin(self._retire(role, name))
        return names

    async def _grow(self, role: Role) -> None:
        """Starts workers that are missing; those that leave are missed once they are gone."""
        try:
            for name, endpoint in (await self._crew.grow(role, self._wanted[role])).items():
                logger.info("%s was started at %s", name, endpoint)
        except KvpactError as error:
            logger.error("a %s worker could not be started: %s", role.value, error)

    async def _retire(self, role: Role, name: str) -> None:
        """Drains a worker, waits until it holds nothing or the time is over, and ends it."""
        try:
            await finish(_Named(self._fleet, name), within_s=self._drain_s, hurry=asyncio.Event())
            lives = [life for life in self._fleet.lives() if life.worker == name]
            await self._crew.end(name)
            for life in lives:
                self._fleet.forget(life)
        except KvpactError as error:
            logger.error("%s could not be ended: %s", name, error)
        finally:
            self._leaving.discard(name)
        self._begin(self._grow(role))


class _Named:
    """A worker of the fleet by name, to be drained."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def drain(self) -> int:
        """Requests that it still has: by the coordinator's own count where it doesn't answer, 0 once gone."""
        for state in self._fleet.snapshot().workers:
            if state.worker.life.worker == self._name:
                try:
                    return await self._fleet.drain(state.worker.life)
                except KvpactError as error:
                    logger.warning("%s can't be drained: %s", self._name, error)
                    return state.assigned
        return 0
