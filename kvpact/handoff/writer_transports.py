"""Transports of one writer: what it offers readers, what a pair agrees on, and the carriers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from kvpact.errors import Unavailable
from kvpact.handoff.finishing import finished
from kvpact.handoff.nixl_transport import NixlWriter
from kvpact.handoff.regions import Carrier, ShmSegment
from kvpact.handoff.shm_transport import ShmCarrier, shm_offer, trial_segment
from kvpact.handoff.transport_choice import AUTO, GRPC, NIXL, SHM, TransportChoice, TransportOffer, choose

SHM_IDLE_BYTES = 512 << 20


class WriterTransports:
    """One per process, for all its pairs. Used from one event loop."""

    def __init__(
        self,
        *,
        wanted: str = AUTO,
        shm_idle_bytes: int = SHM_IDLE_BYTES,
        open_nixl: Callable[[], NixlWriter] | None = None,
        without_nixl: str = "it has no staging",
    ) -> None:
        """`wanted`: the setting handoff.transport. `without_nixl` is why there is no nixl.

        `open_nixl` is called, on a thread, when the first pair may need it; it may raise Unavailable.
        """
        self._wanted = wanted
        self._shm = ShmCarrier(most_bytes=shm_idle_bytes)
        self._open_nixl = open_nixl
        self._nixl: NixlWriter | None = None
        self._without_nixl = without_nixl
        self._opening = asyncio.Lock()

    def trial(self) -> AbstractContextManager[ShmSegment | None]:
        """A segment for the reader to try, while the pair is made; None where shm isn't wanted."""
        return trial_segment() if self._wanted in (AUTO, SHM) else nullcontext()

    async def agree(self, reader: Iterable[TransportOffer]) -> tuple[TransportChoice, Carrier | None]:
        """The transport of a pair and what carries its payloads; None where the messages do.

        Raises:
            Unavailable: the wanted one doesn't work between the two.
        """
        offers = tuple(reader)
        choice = choose(self._wanted, (shm_offer(), await self._nixl_offer(offers)), offers)
        if choice.name == SHM:
            return choice, self._shm
        if choice.name == NIXL and self._nixl is not None:
            (theirs,) = (offer for offer in offers if offer.name == NIXL)
            return choice, await self._nixl.carrier(theirs.agent)
        assert choice.name == GRPC
        return choice, None

    async def _nixl_offer(self, reader: tuple[TransportOffer, ...]) -> TransportOffer:
        """Starts the agent where the reader has one."""
        theirs = any(offer.name == NIXL and offer.available for offer in reader)
        async with self._opening:
            if self._nixl is None and self._open_nixl is not None and theirs:
                try:
                    await finished(asyncio.to_thread(self._open_nixl), self._keep)
                except Unavailable as error:
                    self._open_nixl, self._without_nixl = None, str(error)
        available = self._nixl is not None or self._open_nixl is not None
        return TransportOffer(name=NIXL, available=available, reason="" if available else self._without_nixl)

    def _keep(self, nixl: NixlWriter) -> None:
        self._nixl = nixl

    def quarantined_bytes(self) -> int:
        """Staging that a write which can't be stopped may still read; segments without an answer are gone."""
        return 0 if self._nixl is None else self._nixl.quarantined_bytes()

    def close(self) -> None:
        """Lets segments and staging go. Idempotent."""
        self._shm.close()
        if self._nixl is not None:
            self._nixl.close()
