"""The writer's side of handoffs: reserves, pushes while it renews the lease, releases what it doesn't finish.

Leaving the block without an acknowledged commit releases the handoff on the reader:

    async with sender.reserved(terms, max_output_tokens) as handoff:
        sent = await handoff.send(computed, read, first_token, witnesses)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace

from kvpact.clock import Clock
from kvpact.contract.contract import SCHEMA_MAJOR, Contract
from kvpact.contract.identity import contract_digest
from kvpact.errors import BadRequest, ContractRefused, Exhausted, Fenced, KvpactError
from kvpact.handoff.codec import contract_to_bytes
from kvpact.handoff.finishing import finished
from kvpact.handoff.messages import HandoffTerms, PairAnswer, PairOffer, Reservation
from kvpact.handoff.outgoing import BlockReader, Outgoing, ShowWitnesses, show_none
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.regions import Carrier
from kvpact.handoff.sending import SendingHandoff, Sent, Sleep
from kvpact.handoff.transport_choice import GRPC, NIXL, TransportChoice
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.types import VerdictWord, WorkerLife

logger = logging.getLogger(__name__)

RELEASE_DEADLINE_S = 5.0
GAVE_UP = "the writer gave up"
NOTHING_GRANTED = (BadRequest, ContractRefused, Exhausted, Fenced)
"""Answers to Reserve after which there is nothing of this writer to release."""


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
        transports: WriterTransports | None = None,
    ) -> None:
        self._port = port
        self._transports = transports or WriterTransports(wanted=GRPC)
        self._carrier: Carrier | None = None
        self.choice: TransportChoice | None = None
        """How payloads travel; None before `pair`, and then as grpc."""
        self._life = life
        self._contract = contract
        self._clock = clock
        self._executor = executor
        self._sleep = sleep
        self.digest = contract_digest(contract)
        """Digest of the writer's contract, for terms."""

    async def pair(self, reader: WorkerLife) -> PairAnswer:
        """Offers the writer's contract to one life of the reader; a refusal is a normal answer.

        Raises:
            Unavailable: the transport that the settings ask for doesn't work between the two.
            KvpactError: whatever the reader answers.
        """
        with self._transports.trial() as trial:
            offer = PairOffer(
                schema_major=SCHEMA_MAJOR,
                contract_digest=self.digest,
                writer=self._life,
                reader=reader,
                contract=contract_to_bytes(self._contract),
                shm_trial=trial,
            )
            answer = await self._port.pair(offer)
        if answer.verdict.word is not VerdictWord.REJECT:
            self.choice, self._carrier = await self._transports.agree(answer.transports)
        return answer

    @asynccontextmanager
    async def reserved(self, terms: HandoffTerms, max_output_tokens: int) -> AsyncIterator[SendingHandoff]:
        """Reserves on entry, renews the lease until exit; exit without an acknowledged commit releases.

        Raises:
            KvpactError: whatever the reader answers to Reserve.
        """
        carrier = self._carrier
        if self.choice is not None:
            terms = replace(terms, transport=self.choice.name)
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
            if carrier is not None:
                await outgoing.load(carrier)
            yield sending
        finally:
            try:
                if sending.result is None:
                    await self._give_up(terms, sending)
                else:
                    await sending.stop_renewing()
            finally:
                outgoing.unload(acknowledged=sending.acknowledged)

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
            reservation = await self._port.reserve(terms, max_output_tokens)
            _check_grant(reservation, terms, self._contract)
            return reservation
        except NOTHING_GRANTED:
            raise
        except BaseException:
            await self._give_up(terms, None)
            raise

    async def _give_up(self, terms: HandoffTerms, sending: SendingHandoff | None) -> None:
        """Releases on the reader, cancelled or not, within RELEASE_DEADLINE_S; else the lease does it."""
        await finished(self._release(terms, sending))

    async def _release(self, terms: HandoffTerms, sending: SendingHandoff | None) -> None:
        if sending is not None:
            await sending.stop_renewing()
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                if terms.transport == NIXL and (sending is None or sending.still()):
                    await self._port.release(terms.handoff_id, GAVE_UP, writer_stopped=True)
                else:
                    await self._port.release(terms.handoff_id, GAVE_UP)
        except (KvpactError, TimeoutError) as error:
            logger.warning("handoff %s left to its lease: %s", terms.handoff_id.hex(), error)
        else:
            if sending is not None:
                sending.acknowledged = True


def _check_grant(reservation: Reservation, terms: HandoffTerms, writer: Contract) -> None:
    """Raises KvpactError for a grant that no reader gives for these terms: that is the reader's fault."""
    held, size = reservation.held_prefix_tokens, writer.layout.block_size
    if reservation.handoff_id != terms.handoff_id:
        raise KvpactError(f"the reader granted another handoff than {terms.handoff_id.hex()}")
    if held % size or not 0 <= held < len(terms.token_ids):
        raise KvpactError(
            f"the reader says that it holds {held} tokens; expected whole blocks of {size} tokens and fewer "
            f"than the {len(terms.token_ids)} of the prompt"
        )
