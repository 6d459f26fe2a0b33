"""Starts worker actors on Ray, waits until they serve, and ends them; Ray itself restarts what dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from kvpact.config import Config
from kvpact.errors import Unavailable
from kvpact.handoff.status import status_from_bytes
from kvpact.types import Role

STOP_DEADLINE_S = 10.0
HEALTH_INTERVAL_S = 5.0
HEALTH_DEADLINE_S = 5.0
logger = logging.getLogger(__name__)


class Supervisor:
    """Owns the actors of one cluster from `start` to `stop`."""

    def __init__(self, config: Config, actor_classes: Mapping[Role, Any]) -> None:
        self._config = config
        self._actor_classes = actor_classes
        self._actors: dict[str, Any] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self, coordinator: str) -> dict[str, str]:
        """Creates every worker and gives worker name -> endpoint once all serve.

        Raises:
            KvpactError: a worker can't serve; the text is the worker's own.
        """
        settings = self._config.model_dump(mode="json")
        counts = {Role.PREFILL: self._config.prefill_workers, Role.DECODE: self._config.decode_workers}
        for role, count in counts.items():
            for index in range(count):
                name = f"{role}-{index}"
                self._actors[name] = self._actor_classes[role].remote(settings, name, coordinator)
        try:
            reports = await asyncio.gather(*(actor.report.remote() for actor in self._actors.values()))
        except RayError as error:
            raise Unavailable(f"a worker process ended before it served: {error}") from error
        endpoints: dict[str, str] = {}
        for name, report in zip(self._actors, reports, strict=True):
            if isinstance(report, bytes):
                raise status_from_bytes(report)
            endpoints[name] = report
        self._watching = asyncio.create_task(self._watch(), name="supervise")
        return endpoints

    async def stop(self) -> None:
        """Ends every worker, by force where one doesn't answer in time. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        actors, self._actors = self._actors, {}
        stopping = [asyncio.ensure_future(actor.stop.remote()) for actor in actors.values()]
        if stopping:
            await asyncio.wait(stopping, timeout=STOP_DEADLINE_S)
        for task in stopping:
            task.cancel()
        for actor in actors.values():
            ray.kill(actor, no_restart=True)

    async def _watch(self) -> None:
        """Ends processes that live and no longer work, so that Ray starts them again."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            for name, actor in self._actors.items():
                if not await self._works(actor):
                    logger.warning("%s no longer works and is started again", name)
                    ray.kill(actor, no_restart=False)

    async def _works(self, actor: Any) -> bool:
        """False where the worker says so itself. Ray restarts a dead one without our doing."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                return bool(await actor.healthy.remote())
        except (RayError, TimeoutError):
            return True
