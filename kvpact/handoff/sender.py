"""The writer's side of handoffs: reserves, pushes while it renews the lease, releases what it doesn't finish.

Leaving the block without an acknowledged commit releases the handoff on the reader:

    async with sender.reserved(terms, max_output_tokens) as handoff:
        sent = await handoff.send(computed, read, first_token, witnesses)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvpact.clock import Clock
from kvpact.contract.contract import SCHEMA_MAJOR, Contract
from kvpact.contract.identity import contract_digest
from kvpact.contract.witness_places import Place
from kvpact.errors import BadRequest, ContractRefused, Exhausted, Fenced, KvpactError, Unavailable
from kvpact.handoff.codec import contract_to_bytes
from kvpact.handoff.messages import CommitReceipt, HandoffTerms, PairAnswer, PairOffer, Reservation
from kvpact.handoff.outgoing import BlockReader, Outgoing, ShowWitnesses, show_none
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.witness_terms import places_to_show
from kvpact.types import WorkerLife

logger = logging.getLogger(__name__)

RELEASE_DEADLINE_S = 5.0
RENEWALS_PER_LEASE = 3
NOTHING_GRANTED = (BadRequest, ContractRefused, Exhausted, Fenced)
"""Answers to Reserve after which there is nothing of this writer to release."""
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


class Sender:
    """Hands caches of one writer over to one reader; any number of handoffs at a time.

    Args:
        executor: threads that read the writer's cache; None takes the event loop's own.
        sleep: waits between renewals; tests give their own.
    """

    def __init__(
        self,
        *,
        port: ReaderPort,
        life: WorkerLife,
        contract: Contract,
        clock: Clock,
        executor: Executor | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._port = port
        self._life = life
        self._contract = contract
        self._clock = clock
        self._executor = executor
        self._sleep = sleep
        self.digest = contract_digest(contract)
        """Digest of the writer's contract, for terms."""

    async def pair(self, reader: WorkerLife) -> PairAnswer:
        """Offers the writer's contract to one life of the reader; a refusal is a normal answer."""
        offer = PairOffer(
            schema_major=SCHEMA_MAJOR,
            contract_digest=self.digest,
            writer=self._life,
            reader=reader,
            contract=contract_to_bytes(self._contract),
        )
        return await self._port.pair(offer)

    @asynccontextmanager
    async def reserved(self, terms: HandoffTerms, max_output_tokens: int) -> AsyncIterator[SendingHandoff]:
        """Reserves on entry, renews the lease until exit; exit without an acknowledged commit releases.

        Raises:
            KvpactError: whatever the reader answers to Reserve.
        """
        reservation = await self._reserve(terms, max_output_tokens)
        outgoing = Outgoing(
            terms=terms,
            reservation=reservation,
            contract=self._contract,
            clock=self._clock,
            executor=self._executor,
        )
        sending = SendingHandoff(
            port=self._port,
            contract=self._contract,
            terms=terms,
            reservation=reservation,
            outgoing=outgoing,
            clock=self._clock,
        )
        sending.start_renewing(self._sleep)
        try:
            yield sending
        finally:
            if sending.result is None:
                await self._give_up(terms, sending)
            else:
                await sending.stop_renewing()

    async def hand_over(
        self,
        terms: HandoffTerms,
        max_output_tokens: int,
        computed: AsyncIterator[int],
        read: BlockReader,
        first_token: asyncio.Future[int],
        witnesses: ShowWitnesses = show_none,
    ) -> Sent:
        """Reserve, push and commit in one call, for a prompt whose prefill may run already."""
        async with self.reserved(terms, max_output_tokens) as handoff:
            return await handoff.send(computed, read, first_token, witnesses)

    async def _reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """A reservation; releases one that the reader may have granted without this side hearing of it."""
        try:
            return await self._port.reserve(terms, max_output_tokens)
        except NOTHING_GRANTED:
            raise
        except BaseException:
            await self._give_up(terms, None)
            raise

    async def _give_up(self, terms: HandoffTerms, sending: SendingHandoff | None) -> None:
        """Releases on the reader, cancelled or not, within RELEASE_DEADLINE_S; else the lease does it."""
        closing = asyncio.ensure_future(self._release(terms, sending))
        cancelled = False
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _release(self, terms: HandoffTerms, sending: SendingHandoff | None) -> None:
        if sending is not None:
            await sending.stop_renewing()
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self._port.release(terms.handoff_id, "the writer gave up")
        except (KvpactError, TimeoutError) as error:
            logger.warning("handoff %s left to its lease: %s", terms.handoff_id.hex(), error)


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
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            await parts.aclose()
            await self._outgoing.settled()
        self.result = self._sent(receipt)
        return self.result

    def places_to_show(self) -> tuple[Place, ...]:
        """Rows whose witnesses the reader asks for; known before prefill starts."""
        reservation = self.reservation
        return places_to_show(
            self._contract,
            self._terms,
            nonce=reservation.nonce,
            first_computed=reservation.held_prefix_tokens,
        )

    def start_renewing(self, sleep: Sleep) -> None:
        """Renews the lease until stopped, or until the reader no longer knows the handoff."""
        self._renewing = asyncio.create_task(self._renew(sleep))

    async def stop_renewing(self) -> None:
        """Ends renewing. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

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
            await sleep(lease_s / RENEWALS_PER_LEASE)
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
