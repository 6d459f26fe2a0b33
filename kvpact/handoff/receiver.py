"""The reader's side of handoffs: pairs, reserves, takes bytes in, gives committed handoffs to the decoder.

Runs on one event loop; landings run on executor threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass

from kvpact.clock import Clock
from kvpact.contract.compare import Policy, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest, Fenced, Unavailable, UnknownHandoff
from kvpact.handoff.arrival import Arrival
from kvpact.handoff.grants import Grants, Marks
from kvpact.handoff.handoff_table import HandoffTable, HeldHandoff, ReceiverCounters, ReceiverLimits
from kvpact.handoff.landing import Landing
from kvpact.handoff.lease_timer import CallLater, loop_call_later
from kvpact.handoff.messages import (
    Chunk,
    CommitReceipt,
    HandoffState,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    PushPart,
    Reservation,
)
from kvpact.handoff.pairing import Judged, PairBook
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.terms import check_terms, positions_of
from kvpact.handoff.trust import CanaryJudge, Verifier
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockId, ContractDigest, HandoffId, Verdict, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A committed handoff that its taker owns: prompt, cache and first token."""

    handoff_id: HandoffId
    token_ids: tuple[int, ...]
    """Prompt tokens; their keys and values are in `blocks`."""
    positions: tuple[int, ...]
    """Of the prompt tokens, ascending."""
    blocks: tuple[BlockId, ...]
    """In order, in the reader's block size; the taker frees them."""
    next_position: int
    table_length: int
    first_token_id: int
    first_token_logprob: float | None
    max_output_tokens: int


class Receiver:
    """A ReaderPort, and so its own in-process transport.

    Args:
        verifier: checks witnesses before a handoff counts.
        judge: judges the probes of new pairs, which reserve nothing else before; None asks for none.
        executor: threads for landings; None takes the event loop's own.
        call_later: sets the alarm for leases; None takes the running event loop's.
        marks: nonces and the first generation; a replay gives those that were recorded.
    """

    def __init__(
        self,
        *,
        life: WorkerLife,
        contract: Contract,
        policy: Policy,
        pool: BlockPool,
        landing: Landing,
        verifier: Verifier,
        judge: CanaryJudge | None,
        clock: Clock,
        limits: ReceiverLimits | None = None,
        executor: Executor | None = None,
        call_later: CallLater = loop_call_later,
        marks: Marks | None = None,
        transports: ReaderTransports | None = None,
    ) -> None:
        self._life = life
        self._contract = contract
        self._limits = limits or ReceiverLimits()
        self._pairs = PairBook(contract, policy)
        self._transports = transports or ReaderTransports()
        self._table = HandoffTable(pool=pool, clock=clock, limits=self._limits, call_later=call_later)
        self._table.on_end = self._transports.handoff_ended
        self._judge = judge
        self._grants = Grants(
            contract=contract, pool=pool, limits=self._limits, marks=marks, transports=self._transports
        )
        self._arrival = Arrival(
            table=self._table,
            pairs=self._pairs,
            landing=landing,
            verifier=verifier,
            judge=judge,
            executor=executor,
            prefixes=self._grants.prefixes,
            transports=self._transports,
        )
        self._draining = False

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort. A writer's new life ends what its old one reserved."""
        self._check_life(offer.reader)
        verdict = self._pairs.offer(offer)
        for handoff in self._table.held():
            writer = handoff.terms.writer
            if writer.worker == offer.writer.worker and writer != offer.writer and handoff.commit is None:
                self._table.end(handoff, "its writer restarted")
        return PairAnswer(
            verdict=verdict,
            reader_contract=self._contract,
            transports=await self._transports.offers(offer.writer, offer.shm_trial),
        )

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort. The same terms under the same id give the same reservation."""
        self._check_life(terms.reader)
        held = self._held_before(terms, max_output_tokens)
        if held is not None:
            return held.reservation
        if self._draining:
            raise Unavailable(f"decode worker {self._life.worker} is draining")
        judged = self._pairs.usable(terms)
        check_terms(terms, judged.contract, context_tokens=pairing_reach(judged.contract, self._contract))
        if max_output_tokens < 1:
            raise BadRequest(
                f"max_output_tokens is {max_output_tokens}; expected at least 1", param="max_output_tokens"
            )
        if terms.canary:
            self._check_canary(terms, judged)
        else:
            self._grants.check_room(terms, max_output_tokens)
            if self._judge is not None:
                self._pairs.require_probe(terms)
        handoff = self._grants.grant(terms, max_output_tokens, judged)
        self._table.add(handoff)
        return handoff.reservation

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort. A cancelled or broken stream ends the handoff at once."""
        return await self._arrival.take_in(parts)

    def inline(self, chunk: Chunk) -> Chunk | None:
        """A chunk of a running push with its payload, wherever that lies; None where it lies nowhere."""
        return self._arrival.inline(chunk)

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See ReaderPort."""
        self._check_life(life)
        self._table.renew(self._table.find(handoff_id))
        return self._limits.lease_s

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See ReaderPort. A handoff that Decode took stays the decoder's to end."""
        if writer_stopped:
            self._transports.writer_stopped(handoff_id)
        handoff = self._table.get(handoff_id)
        if handoff is not None:
            state = handoff.state
            self._table.end(handoff, f"released: {reason}")
            return state
        stone = self._table.tombstone(handoff_id)
        if stone is None:
            self._table.bury(handoff_id, f"released before it was reserved: {reason}")
            return None
        return stone.state

    def take(self, handoff_id: HandoffId, life: WorkerLife, token_ids: tuple[int, ...]) -> Taken:
        """Passes a committed handoff to the decoder, which owns its blocks from here; once per handoff.

        Args:
            token_ids: prompt and first token as the order to decode has them.

        Raises:
            Fenced: another life or other tokens are meant, or the handoff was taken before.
            UnknownHandoff: it ended, was never reserved, or isn't committed.
        """
        self._check_life(life)
        handoff = self._table.find(handoff_id)
        terms, commit = handoff.terms, handoff.commit
        if commit is None:
            raise UnknownHandoff(f"handoff {handoff_id.hex()} isn't committed", handoff_id=handoff_id)
        if token_ids != (*terms.token_ids, commit.first_token_id):
            raise Fenced(
                "token_ids aren't the prompt and first token that were handed over",
                expected=f"{len(terms.token_ids)} prompt tokens, then token {commit.first_token_id}",
                found=f"{len(token_ids)} tokens, the last one {token_ids[-1] if token_ids else 'none'}",
            )
        return Taken(
            handoff_id=handoff_id,
            token_ids=terms.token_ids,
            positions=positions_of(terms.positions),
            blocks=self._table.take(handoff, "sequence"),
            next_position=terms.next_position,
            table_length=terms.table_length,
            first_token_id=commit.first_token_id,
            first_token_logprob=commit.first_token_logprob,
            max_output_tokens=handoff.max_output_tokens,
        )

    def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """A verdict given at pairing. Raises BadRequest where there is none."""
        return self._pairs.verdict(writer_digest, reader_digest)

    def drain(self) -> None:
        """Reserves nothing new; what is held goes on."""
        self._draining = True

    def sweep(self) -> None:
        """Ends what outlived its lease; the alarm calls it by itself."""
        self._table.sweep()

    def held(self) -> int:
        """Handoffs whose blocks are the receiver's now, ended ones included whose last landing still runs."""
        return len(tuple(self._table.held())) + self._table.freeing()

    def counters(self) -> ReceiverCounters:
        """Counts of this process life."""
        return self._table.counters

    def quarantined_bytes(self) -> int:
        """Staging that nobody may have, since the writer of an ended handoff might still write into it."""
        return self._transports.quarantined_bytes()

    def close(self) -> None:
        """Ends every handoff and takes the alarm back."""
        self._table.close()
        self._transports.close()

    def _check_life(self, meant: WorkerLife) -> None:
        if meant != self._life:
            raise Fenced(
                f"{meant.worker} in life {meant.incarnation.hex()} is meant; this is {self._life.worker}",
                expected=self._life.incarnation.hex(),
                found=meant.incarnation.hex(),
            )

    def _held_before(self, terms: HandoffTerms, max_output_tokens: int) -> HeldHandoff | None:
        """The handoff that this id already names, if its terms are the same."""
        held, stone = self._table.get(terms.handoff_id), self._table.tombstone(terms.handoff_id)
        if held is None and stone is None:
            return None
        if held is not None and (held.terms, held.max_output_tokens) == (terms, max_output_tokens):
            return held
        found = "an id with other terms" if stone is None else f"an id whose handoff ended ({stone.reason})"
        raise Fenced(
            f"handoff {terms.handoff_id.hex()} can't be reserved: it is {found}",
            expected="a new handoff id",
            found=found,
        )

    def _check_canary(self, terms: HandoffTerms, judged: Judged) -> None:
        if self._judge is None:
            raise BadRequest("terms.canary is set; this reader judges no canaries", param="terms.canary")
        self._judge.expect(judged.contract, terms)
