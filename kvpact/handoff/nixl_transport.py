"""The writer's side of NIXL: chunks are made in registered slots and written into the reader's staging."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvpact.errors import Exhausted, Unavailable
from kvpact.handoff.arena import Arena
from kvpact.handoff.finishing import finished
from kvpact.handoff.nixl_agent import DONE, MOVING, Agent, Transfer
from kvpact.handoff.regions import NixlRegion, ShmSegment

logger = logging.getLogger(__name__)

SLOTS = 4
"""Chunks of one handoff in the writer's staging: one on its way, those that are made ahead, one spare."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.005
RETRY_AFTER_S = 1.0
Sleep = Callable[[float], Awaitable[None]]


class NixlWriter:
    """Owns the writer's agent, its area, and the one thread that calls it."""

    def __init__(self, agent: Agent, *, sleep: Sleep = asyncio.sleep) -> None:
        """`sleep` waits between two looks at a write that is on its way."""
        self._agent = agent
        self._sleep = sleep
        self._arena = Arena(len(agent.memory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpact-nixl")
        self._quarantined: set[int] = set()

    async def carrier(self, metadata: bytes) -> NixlCarrier:
        """A carrier to the reader whose agent says so of itself. Raises Unavailable."""
        meet = partial(self._agent.meet, metadata)
        return NixlCarrier(self, await asyncio.get_running_loop().run_in_executor(self._thread, meet))

    def take(self, size_bytes: int) -> tuple[int, memoryview]:
        """A run of the area. Raises Exhausted."""
        offset = self._arena.take(size_bytes)
        if offset is None:
            raise Exhausted(
                f"a handoff takes {size_bytes} bytes of the writer's staging; {self._arena.free_bytes()} of "
                f"{self._arena.size_bytes} are free; raise handoff.staging_bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        return offset, self._agent.memory[offset : offset + size_bytes]

    def give(self, offset: int, *, still: bool) -> None:
        """Ends a run; one that a write may still read stays set aside."""
        if still:
            self._arena.give(offset)
        else:
            self._quarantined.add(offset)

    async def write(self, peer: str, offset: int, size_bytes: int, address: int) -> None:
        """Returns when the bytes are there. Cancelled, it returns when they don't move any more.

        Raises:
            Unavailable: they can't get there.
            StillMoving: it was cancelled, and the write can't be stopped.
        """
        loop = asyncio.get_running_loop()
        begin = partial(self._agent.write, peer, offset, size_bytes, address)
        beginning = loop.run_in_executor(self._thread, begin)
        try:
            transfer = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            stopping = asyncio.ensure_future(self._stop_begun(beginning))
            try:
                await finished(stopping)
            finally:
                stopping.result()
            raise
        try:
            wait_s = FIRST_WAIT_S
            while (state := await self._state(transfer)) == MOVING:
                await self._sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            await self._stop(transfer)
        if state != DONE:
            raise Unavailable(f"a NIXL write of {size_bytes} bytes to {peer} failed")

    def quarantined_bytes(self) -> int:
        """Of the area, what a write that can't be stopped may still read."""
        return sum(self._arena.length(offset) for offset in self._quarantined)

    def close(self) -> None:
        """Ends the thread and the registration. Idempotent."""
        self._thread.shutdown()
        self._agent.close()

    async def _state(self, transfer: Transfer) -> str:
        looking = asyncio.get_running_loop().run_in_executor(self._thread, transfer.state)
        return await asyncio.shield(looking)

    async def _stop_begun(self, beginning: asyncio.Future[Transfer]) -> None:
        await asyncio.wait([beginning])
        if beginning.exception() is None:
            await self._stop(beginning.result())

    async def _stop(self, transfer: Transfer) -> None:
        """Raises StillMoving where it goes on, also when cancelled meanwhile."""
        stopping = asyncio.get_running_loop().run_in_executor(self._thread, transfer.stop)
        try:
            await finished(stopping)
        finally:
            if not stopping.result():
                raise StillMoving("a NIXL write can't be stopped")


class StillMoving(Unavailable):
    """A write goes on though nobody wants it any more."""


class NixlCarrier:
    """See Carrier: to one reader."""

    def __init__(self, writer: NixlWriter, peer: str) -> None:
        self._writer = writer
        self._peer = peer

    async def load(self, region: NixlRegion | None, size_bytes: int, chunk_bytes: int) -> NixlCargo:
        """See Carrier."""
        if region is None or region.size_bytes < size_bytes:
            found = "none" if region is None else f"{region.size_bytes} bytes"
            raise Unavailable(f"the reader granted {found} of staging; the handoff takes {size_bytes}")
        return NixlCargo(self._writer, self._peer, region, chunk_bytes)


class NixlCargo:
    """See Cargo. Chunks take SLOTS slots in turn: one's bytes stay until SLOTS - 1 more were asked for."""

    segment: ShmSegment | None = None
    chunks_ahead = SLOTS - 2

    def __init__(self, writer: NixlWriter, peer: str, region: NixlRegion, chunk_bytes: int) -> None:
        self._writer = writer
        self._peer = peer
        self._region = region
        self._chunk_bytes = chunk_bytes
        self._start, self._memory = writer.take(SLOTS * chunk_bytes)
        self._slot_of: dict[int, int] = {}
        self._count = 0
        self._open = True
        self._still = True

    def space(self, offset: int, size_bytes: int) -> memoryview:
        """See Cargo."""
        at = self._count % SLOTS * self._chunk_bytes
        self._slot_of[offset] = at
        self._count += 1
        return self._memory[at : at + size_bytes]

    async def ship(self, offset: int, size_bytes: int) -> None:
        """See Cargo."""
        start = self._start + self._slot_of.pop(offset)
        try:
            await self._writer.write(self._peer, start, size_bytes, self._region.address + offset)
        except StillMoving:
            self._still = False
            raise

    def still(self) -> bool:
        """See Cargo."""
        return self._still

    def close(self, *, acknowledged: bool) -> None:
        """See Cargo."""
        if self._open:
            self._open = False
            self._writer.give(self._start, still=self._still)
