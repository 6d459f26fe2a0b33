"""The reader's staging for NIXL: a registered area, a part of it for each handoff that asks.

A writer that went silent may still have a write on its way. So a part serves another handoff only after
its writer said that it stopped: by its commit, by a release of its own, or by coming back as another process
life. Until then it is set aside and counted. Used from one event loop, except for the views of a region.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpact.errors import BadRequest, Exhausted
from kvpact.handoff.arena import Arena
from kvpact.handoff.nixl_agent import Agent
from kvpact.handoff.region_layout import check_inside
from kvpact.handoff.regions import NixlRegion
from kvpact.handoff.transport_choice import NIXL, TransportOffer
from kvpact.types import HandoffId, WorkerLife

logger = logging.getLogger(__name__)

POLL_S = 0.001
RETRY_AFTER_S = 1.0
Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class _Part:
    """Staging of one handoff."""

    offset: int
    size_bytes: int
    writer: WorkerLife
    quarantined: bool = False


class Staging:
    """Owns the area and its agent."""

    def __init__(self, agent: Agent, *, sleep: Sleep = asyncio.sleep) -> None:
        """`sleep` waits between two polls of the agent while a push is open."""
        self._agent = agent
        self._sleep = sleep
        self._arena = Arena(len(agent.memory))
        self._parts: dict[HandoffId, _Part] = {}
        self._open = 0
        self._polling: asyncio.Task[None] | None = None

    def offer(self) -> TransportOffer:
        """What a writer needs to reach the area."""
        return TransportOffer(
            name=NIXL,
            available=True,
            reason=f"{self._arena.size_bytes >> 20} MiB of staging are registered",
            agent=self._agent.metadata(),
        )

    def grant(self, handoff_id: HandoffId, writer: WorkerLife, size_bytes: int) -> NixlRegion:
        """Sets a part aside.

        Raises:
            BadRequest: the whole area is too small.
            Exhausted: there is no room now.
        """
        if size_bytes > self._arena.size_bytes:
            raise BadRequest(
                f"the handoff takes {size_bytes} bytes of staging; there are {self._arena.size_bytes}; "
                "raise handoff.staging_bytes, or set handoff.transport to grpc",
                param="transport",
            )
        offset = self._arena.take(size_bytes)
        if offset is None:
            raise Exhausted(
                f"the handoff takes {size_bytes} bytes of staging; {self._arena.free_bytes()} of "
                f"{self._arena.size_bytes} are free, {self.quarantined_bytes()} are in quarantine",
                retry_after_s=RETRY_AFTER_S,
            )
        self._parts[handoff_id] = _Part(offset=offset, size_bytes=size_bytes, writer=writer)
        return NixlRegion(address=self._agent.address + offset, size_bytes=size_bytes)

    def region(self, handoff_id: HandoffId) -> StagingRegion:
        """The part of a handoff that was granted one; the agent is polled until it is closed."""
        part = self._parts[handoff_id]
        self._open += 1
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        return StagingRegion(self, self._agent.memory[part.offset : part.offset + part.size_bytes])

    def closed(self) -> None:
        """A region needs no polls any more."""
        self._open -= 1
        if self._open == 0 and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def give_back(self, handoff_id: HandoffId, *, writer_stopped: bool) -> None:
        """The handoff is over. Idempotent; a part in quarantine is free again once its writer stopped."""
        part = self._parts.get(handoff_id)
        if part is None:
            return
        part.quarantined = True
        if writer_stopped:
            self._free(handoff_id)

    def writer_lives(self, life: WorkerLife) -> None:
        """A writer paired: other lives of it write no more."""
        for handoff_id, part in list(self._parts.items()):
            if part.quarantined and part.writer.worker == life.worker and part.writer != life:
                self._free(handoff_id)

    def quarantined_bytes(self) -> int:
        """Bytes that nobody may have."""
        return sum(self._arena.length(part.offset) for part in self._parts.values() if part.quarantined)

    def close(self) -> None:
        """Takes the registration back, after which nobody can write. Idempotent."""
        self._parts.clear()
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        self._agent.close()

    def _free(self, handoff_id: HandoffId) -> None:
        self._arena.give(self._parts.pop(handoff_id).offset)

    async def _poll(self) -> None:
        well = True
        while True:
            try:
                self._agent.poll()
                well = True
            except Exception as error:
                if well:
                    logger.warning("the NIXL agent can't be polled: %s", error)
                well = False
            await self._sleep(POLL_S)


class StagingRegion:
    """See Region."""

    def __init__(self, staging: Staging, memory: memoryview) -> None:
        self._staging = staging
        self._memory = memory.toreadonly()
        self._open = True

    def check(self, offset: int, size_bytes: int) -> None:
        """See Region."""
        check_inside(offset, size_bytes, len(self._memory))

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """See Region."""
        self.check(offset, size_bytes)
        return self._memory[offset : offset + size_bytes]

    def close(self, *, reusable: bool) -> None:
        """See Region; the part itself goes back when its writer stopped."""
        if self._open:
            self._open = False
            self._staging.closed()
