"""Starts worker actors on Ray, waits until they serve, and ends them; Ray itself restarts what dies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from kvpact.config import Config
from kvpact.errors import Unavailable
from kvpact.handoff.status import status_from_bytes
from kvpact.types import Role

STOP_DEADLINE_S = 10.0


class Supervisor:
    """Owns the actors of one cluster from `start` to `stop`."""

    def __init__(self, config: Config, actor_classes: Mapping[Role, Any]) -> None:
        self._config = config
        self._actor_classes = actor_classes
        self._actors: dict[str, Any] = {}

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
        return endpoints

    async def stop(self) -> None:
        """Ends every worker, by force where one doesn't answer in time. Idempotent."""
        actors, self._actors = self._actors, {}
        stopping = [asyncio.ensure_future(actor.stop.remote()) for actor in actors.values()]
        if stopping:
            await asyncio.wait(stopping, timeout=STOP_DEADLINE_S)
        for task in stopping:
            task.cancel()
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
