"""Transports of one reader: what it offers a writer, and the regions of its handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpact.errors import BadRequest, Unavailable
from kvpact.handoff.finishing import finished
from kvpact.handoff.messages import HandoffTerms, Open
from kvpact.handoff.nixl_staging import Staging
from kvpact.handoff.regions import NixlRegion, Region, ShmSegment
from kvpact.handoff.shm_transport import ShmReader, try_segment
from kvpact.handoff.transport_choice import ALWAYS_GRPC, GRPC, NIXL, PREFERRED, SHM, TransportOffer
from kvpact.types import HandoffId, WorkerLife


class ReaderTransports:
    """Used from one event loop, except for the regions that `open` gives."""

    def __init__(
        self,
        *,
        shm: ShmReader | None = None,
        without_shm: str = "it takes payloads in messages only",
        open_staging: Callable[[], Staging] | None = None,
        without_staging: str = "it takes payloads in messages only",
    ) -> None:
        """None means that there is none, and the reasons say why.

        `open_staging` is called, on a thread, when the first writer pairs that has no shm; it may raise
        Unavailable.
        """
        self._shm = shm
        self._without_shm = without_shm
        self._open_staging = open_staging
        self._staging: Staging | None = None
        self._without_staging = without_staging
        self._opening = asyncio.Lock()

    async def offers(self, writer: WorkerLife, trial: ShmSegment | None) -> tuple[TransportOffer, ...]:
        """Every transport, fastest first, with what came of trying it, for a writer that pairs."""
        shm = TransportOffer(name=SHM, available=False, reason=self._without_shm)
        if self._shm is not None:
            shm = try_segment(trial)
        if self._staging is not None:
            self._staging.writer_lives(writer)
        return shm, await self._nixl_offer(needed=not shm.available), ALWAYS_GRPC

    async def _nixl_offer(self, *, needed: bool) -> TransportOffer:
        """Starting an agent takes most of a second and registers memory: only where it may be used."""
        async with self._opening:
            if self._staging is None and self._open_staging is not None:
                if not needed:
                    reason = "it isn't started, since shm works"
                    return TransportOffer(name=NIXL, available=False, reason=reason)
                try:
                    await finished(asyncio.to_thread(self._open_staging), self._keep)
                except Unavailable as error:
                    self._open_staging, self._without_staging = None, str(error)
        if self._staging is None:
            return TransportOffer(name=NIXL, available=False, reason=self._without_staging)
        return self._staging.offer()

    def _keep(self, staging: Staging) -> None:
        self._staging = staging

    def names(self) -> tuple[str, ...]:
        """Transports that a reservation may ask for, fastest first."""
        has = {SHM: self._shm is not None, NIXL: self._staging is not None, GRPC: True}
        return tuple(name for name in PREFERRED if has[name])

    def grant(self, terms: HandoffTerms, size_bytes: int) -> NixlRegion | None:
        """Sets staging aside where the handoff asks for it.

        Raises:
            BadRequest: the transport isn't one of `names`, or no handoff so large fits into staging.
            Exhausted: there is no room in staging now.
        """
        if terms.transport not in self.names():
            raise BadRequest(
                f"transport is {terms.transport!r}; this reader has {', '.join(self.names())}",
                param="transport",
            )
        if terms.transport != NIXL or self._staging is None:
            return None
        return self._staging.grant(terms.handoff_id, terms.writer, size_bytes)

    def open(self, opened: Open, terms: HandoffTerms, size_bytes: int) -> Region | None:
        """The region that a push opens; None where its payload travels in the messages.

        Raises:
            BadRequest, Unavailable: the segment isn't what the writer says.
        """
        if opened.shm is not None:
            if terms.transport != SHM or self._shm is None:
                raise BadRequest(
                    f"open names a segment; transport {terms.transport} was reserved", param="open.shm"
                )
            return self._shm.open(opened.shm, size_bytes)
        if terms.transport == NIXL and self._staging is not None:
            return self._staging.region(terms.handoff_id)
        return None

    def handoff_ended(self, handoff_id: HandoffId) -> None:
        """Its staging stays set aside while its writer may still write into it."""
        if self._staging is not None:
            self._staging.give_back(handoff_id, writer_stopped=False)

    def writer_stopped(self, handoff_id: HandoffId) -> None:
        """The writer said that it writes no more: other handoffs may have the staging."""
        if self._staging is not None:
            self._staging.give_back(handoff_id, writer_stopped=True)

    def quarantined_bytes(self) -> int:
        """Staging that nobody may have, since the writer of an ended handoff might still write into it."""
        return 0 if self._staging is None else self._staging.quarantined_bytes()

    def close(self) -> None:
        """Ends staging and waiting mappings. Idempotent."""
        if self._shm is not None:
            self._shm.close()
        if self._staging is not None:
            self._staging.close()
