"""Starts worker actors on Ray, waits until they serve, and ends them; Ray itself restarts what dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from kvpact.config import Config, PlacementConfig
from kvpact.errors import BadRequest, Unavailable
from kvpact.handoff.status import status_from_bytes
from kvpact.types import Role

STOP_DEADLINE_S = 10.0
HEALTH_INTERVAL_S = 5.0
HEALTH_DEADLINE_S = 5.0
WORD_INTERVAL_S = 30.0
"""A start that takes longer says again and again what it waits for."""
NOT_FOR_WORKERS = {"api": {"api_keys", "admin_keys"}}
"""Settings that stay in the coordinator's process: what an actor is made with, every node of Ray can read."""
logger = logging.getLogger(__name__)


class Supervisor:
    """Owns the actors of one cluster from `start` to `stop`.

    Args:
        joined: the Ray cluster was there before, with nodes among which `prefill.ray` and `decode.ray`
            choose; otherwise it is this machine, and workers take what there is.
    """

    def __init__(self, config: Config, actor_classes: Mapping[Role, Any], *, joined: bool = False) -> None:
        self._config = config
        self._settings = config.model_dump(mode="json", exclude=NOT_FOR_WORKERS)
        self._actor_classes = actor_classes
        self._joined = joined
        self._coordinator = ""
        self._actors: dict[str, Any] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self, coordinator: str) -> dict[str, str]:
        """Creates every worker and gives worker name -> endpoint once all serve.

        Raises:
            KvpactError: a worker can't serve; the text is the worker's own.
        """
        self._coordinator = coordinator
        counts = {Role.PREFILL: self._config.prefill_workers, Role.DECODE: self._config.decode_workers}
        names = [name for role, wanted in counts.items() for name in self._new_names(role, wanted)]
        endpoints = await self._serving(self._create(names))
        self._watching = asyncio.create_task(self._watch(), name="supervise")
        return endpoints

    async def grow(self, role: Role, wanted: int) -> dict[str, str]:
        """Starts workers of a role until there are `wanted`; the new ones with their endpoints.

        One that is ended while it starts is left out.

        Raises:
            KvpactError: a new one can't serve; those are ended, the others go on.
        """
        created = self._create(self._new_names(role, wanted))
        try:
            return await self._serving(created)
        except BaseException:
            await self._end([name for name, actor in created.items() if self._actors.get(name) is actor])
            raise

    def of_role(self, role: Role) -> list[str]:
        """Workers of a role that were started here, by their numbers."""
        return sorted((name for name in self._actors if name.startswith(f"{role}-")), key=_number)

    async def end(self, name: str) -> None:
        """Ends one worker for good, which should have been drained.

        Raises:
            BadRequest: there is none of this name.
        """
        if name not in self._actors:
            known = ", ".join(sorted(self._actors))
            raise BadRequest(f"no worker {name!r} was started here; there are {known}", param="worker")
        await self._end([name])

    async def stop(self) -> None:
        """Ends every worker, by force where one doesn't answer in time. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._end(list(self._actors))

    def owns(self, name: str) -> bool:
        """Whether a worker was started here."""
        return name in self._actors

    def _new_names(self, role: Role, wanted: int) -> list[str]:
        missing = wanted - len(self.of_role(role))
        free = (name for index in count() if (name := f"{role}-{index}") not in self._actors)
        return [next(free) for _ in range(missing)]

    def _create(self, names: Iterable[str]) -> dict[str, Any]:
        """Actors that begin to start, by name."""
        created = {name: self._actor(name) for name in names}
        self._actors |= created
        return created

    def _actor(self, name: str) -> Any:
        role = Role(name.rpartition("-")[0])
        actor_class = self._actor_classes[role]
        if self._joined:
            part = self._config.prefill if role is Role.PREFILL else self._config.decode
            actor_class = actor_class.options(**placement_options(part.ray))
        return actor_class.remote(self._settings, name, self._coordinator)

    async def _serving(self, created: Mapping[str, Any]) -> dict[str, str]:
        """Waits until actors serve: their endpoints, without those that were ended meanwhile."""
        endpoints = asyncio.gather(*(self._endpoint(name, actor) for name, actor in created.items()))
        try:
            while not (await asyncio.wait([endpoints], timeout=WORD_INTERVAL_S))[0]:
                logger.warning("%s: waiting for Ray to place and start them", ", ".join(created))
            found = endpoints.result()
        finally:
            endpoints.cancel()
            await asyncio.gather(endpoints, return_exceptions=True)
        return {name: endpoint for name, endpoint in zip(created, found, strict=True) if endpoint is not None}

    async def _endpoint(self, name: str, actor: Any) -> str | None:
        """Where an actor serves; None for one that was ended meanwhile. Raises what keeps it from serving."""
        try:
            report: str | bytes = await actor.report.remote()
        except RayError as error:
            if self._actors.get(name) is not actor:
                return None
            raise Unavailable(f"{name}'s process ended before it served: {error}") from error
        if isinstance(report, bytes):
            raise status_from_bytes(report)
        return report

    async def _end(self, names: Iterable[str]) -> None:
        actors = [self._actors.pop(name) for name in names if name in self._actors]
        stopping = asyncio.gather(*(actor.stop.remote() for actor in actors), return_exceptions=True)
        try:
            await asyncio.wait([stopping], timeout=STOP_DEADLINE_S)
        finally:
            stopping.cancel()
            for actor in actors:
                ray.kill(actor, no_restart=True)
            await asyncio.gather(stopping, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends processes that live and no longer work, so that Ray starts them again."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            for name, actor in list(self._actors.items()):
                if not await self._works(actor) and self.owns(name):
                    logger.warning("%s no longer works and is started again", name)
                    ray.kill(actor, no_restart=False)

    async def _works(self, actor: Any) -> bool:
        """False where the worker says so itself. Ray restarts a dead one without our doing."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                return bool(await actor.healthy.remote())
        except (RayError, TimeoutError):
            return True


def placement_options(place: PlacementConfig) -> dict[str, Any]:
    """Ray's options for one actor."""
    options: dict[str, Any] = {"num_cpus": place.num_cpus, "num_gpus": place.num_gpus}
    if place.resources:
        options["resources"] = dict(place.resources)
    if place.labels:
        options["label_selector"] = dict(place.labels)
    return options


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
