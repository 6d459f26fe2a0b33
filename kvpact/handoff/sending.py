"""One handoff on the writer's side between Reserve and its end: pushes, and renews the lease meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvpact.clock import Clock
from kvpact.contract.contract import Contract
from kvpact.contract.witness_places import Place
from kvpact.errors import Unavailable
from kvpact.handoff.finishing import finished
from kvpact.handoff.messages import CommitReceipt, HandoffTerms, PushPart, Reservation
from kvpact.handoff.outgoing import BlockReader, Outgoing, ShowWitnesses, show_none
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.witness_terms import places_to_show

RENEWALS_PER_LEASE = 3
SHORTEST_PAUSE_S = 0.01
"""Between renewals, whatever lease a reader grants: none makes its writer spin."""
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A handoff that the reader acknowledged."""

    receipt: CommitReceipt
    first_token_id: int
    chunk_count: int
    payload_bytes: int
    handoff_s: float
    """From the first chunk read to the acknowledged commit."""
    exposed_s: float
    """Of it, what came after the prompt was computed."""


class SendingHandoff:
    """A reservation that this writer holds on a reader."""

    def __init__(
        self,
        *,
        port: ReaderPort,
        contract: Contract,
        terms: HandoffTerms,
        reservation: Reservation,
        outgoing: Outgoing,
        clock: Clock,
    ) -> None:
        self._port = port
        self._contract = contract
        self._terms = terms
        self._outgoing = outgoing
        self._clock = clock
        self._renewing: asyncio.Task[None] | None = None
        self.reservation = reservation
        self.result: Sent | None = None
        """Set once the commit is acknowledged."""
        self.acknowledged = False
        """Whether the reader said that the handoff is over, one way or the other."""

    async def send(
        self,
        computed: AsyncIterator[int],
        read: BlockReader,
        first_token: asyncio.Future[int],
        witnesses: ShowWitnesses = show_none,
    ) -> Sent:
        """Pushes the cache; returns when the reader owns it. No thread reads the cache once it is left.

        Raises:
            KvpactError: the reader's answer; whatever `computed`, `read` or `first_token` raise.
        """
        parts = self._outgoing.parts(computed, read, first_token, witnesses)
        pushing = asyncio.ensure_future(self._port.push(parts))
        try:
            receipt = await self._unless_lost(pushing)
        finally:
            await finished(self._stopped(pushing, parts))
        self.result, self.acknowledged = self._sent(receipt), True
        return self.result

    def places_to_show(self, first_computed: int = 0) -> tuple[Place, ...]:
        """Rows whose witnesses the reader asks for; known before prefill starts.

        `first_computed`: first token that is computed; those before come from this writer's own cache.
        """
        reservation = self.reservation
        return places_to_show(
            self._contract,
            self._terms,
            nonce=reservation.nonce,
            first_computed=first_computed,
            held=reservation.held_prefix_tokens,
        )

    def still(self) -> bool:
        """Whether nothing moves into the reader's region any more."""
        return self._outgoing.still()

    def start_renewing(self, sleep: Sleep) -> None:
        """Renews the lease until stopped, or until the reader no longer knows the handoff."""
        self._renewing = asyncio.create_task(self._renew(sleep))

    async def stop_renewing(self) -> None:
        """Ends renewing. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    async def _stopped(
        self, pushing: asyncio.Future[CommitReceipt], parts: AsyncGenerator[PushPart, None]
    ) -> None:
        """Returns when nothing of the push runs any more."""
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await parts.aclose()
        await self._outgoing.settled()

    async def _unless_lost(self, pushing: asyncio.Future[CommitReceipt]) -> CommitReceipt:
        """The receipt, or what ended the renewals: then the reader doesn't hold the handoff any more."""
        assert self._renewing is not None
        either: set[asyncio.Future[Any]] = {pushing, self._renewing}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not pushing.done():
            self._renewing.result()
        return await pushing

    async def _renew(self, sleep: Sleep) -> None:
        lease_s, renewed_s = self.reservation.lease_s, self._clock.now()
        while True:
            await sleep(max(lease_s / RENEWALS_PER_LEASE, SHORTEST_PAUSE_S))
            try:
                asked_s = self._clock.now()
                lease_s = await self._port.renew(self._terms.handoff_id, self._terms.reader)
                renewed_s = asked_s
            except Unavailable:
                if self._clock.now() - renewed_s >= lease_s:
                    raise

    def _sent(self, receipt: CommitReceipt) -> Sent:
        outgoing, now = self._outgoing, self._clock.now()
        assert outgoing.first_token_id is not None, "a commit carries the first token"
        assert outgoing.computed_s is not None, "a commit follows the whole prompt"
        started_s = outgoing.computed_s if outgoing.started_s is None else outgoing.started_s
        return Sent(
            receipt=receipt,
            first_token_id=outgoing.first_token_id,
            chunk_count=outgoing.chunk_count,
            payload_bytes=outgoing.payload_bytes,
            handoff_s=now - started_s,
            exposed_s=now - outgoing.computed_s,
        )
