"""Runs prompts: reserves on the decode worker, computes, hands over, and tells how it went."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from kvpact.contract.witness_places import Place
from kvpact.engine.engine import Engine
from kvpact.engine.requests import SequenceRequest
from kvpact.errors import DataLoss, Fenced, Unavailable
from kvpact.handoff.jobs import Committed, Partner, PrefillEvent, PrefillJob, Reserved
from kvpact.handoff.sending import Sent
from kvpact.handoff.terms import make_terms
from kvpact.types import HandoffId, WorkerLife
from prefill_worker.computation import Computation
from prefill_worker.partners import Partners

RELEASED_KEPT = 4096
OF_CONTENT = frozenset({"checksum", "witness"})
"""Failed checks after which nothing is computed from cached blocks that were there: one may be stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How this process life's handoffs ended. One that its first token ended is neither."""

    committed: int = 0
    failed: int = 0
    payload_bytes: int = 0
    """Of committed handoffs."""


class Prefiller:
    """Runs any number of prompts; at most `slots` of them hold a reservation or compute at a time."""

    def __init__(self, *, engine: Engine, life: WorkerLife, partners: Partners, slots: int) -> None:
        self._engine = engine
        self._life = life
        self._partners = partners
        self._slots = asyncio.Semaphore(slots)
        self._active: dict[HandoffId, asyncio.Event] = {}
        """Handoffs that run or wait, each with the event that releases it."""
        self._released: OrderedDict[HandoffId, None] = OrderedDict()
        """Ids that may not come again, oldest first."""
        self.draining = False
        self._tally = Tally()

    async def prefill(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        """Reserved, Committed, FirstToken; no Committed without a partner or if that token ends it.

        Leaving the generator early cancels the computation and releases the reservation.

        Raises:
            Fenced: another life of this worker is meant, or the handoff id is in use or was released.
            ContractRefused: the partner refuses this worker's cache; nothing was computed.
            Unavailable: the worker drains, or the handoff was released meanwhile.
            KvpactError: the reader's answer, or what the engine failed with.
        """
        self._check(job)
        released = asyncio.Event()
        self._active[job.handoff_id] = released
        try:
            await self._slot(job, released)
            try:
                work = self._alone(job, released)
                if job.decode is not None:
                    work = self._hand_over(job, job.decode, released)
                async with contextlib.aclosing(work) as events:
                    async for event in events:
                        yield event
            finally:
                self._slots.release()
        finally:
            del self._active[job.handoff_id]

    def give_up(self, handoff_id: HandoffId) -> bool:
        """Ends a handoff at any state, also one whose order is still on its way; whether it ran."""
        self._released[handoff_id] = None
        while len(self._released) > RELEASED_KEPT:
            self._released.popitem(last=False)
        active = self._active.get(handoff_id)
        if active is not None:
            active.set()
        return active is not None

    def drain(self) -> int:
        """Takes no new prompts; how many still run."""
        self.draining = True
        return self.jobs()

    def jobs(self) -> int:
        """Prompts that run or wait."""
        return len(self._active)

    def tally(self) -> Tally:
        """How handoffs ended so far."""
        return self._tally

    async def _slot(self, job: PrefillJob, released: asyncio.Event) -> None:
        """Waits for its turn, which the caller gives back; a way out by an error gives it back itself."""
        acquiring = asyncio.ensure_future(self._slots.acquire())
        releasing = asyncio.ensure_future(released.wait())
        try:
            await asyncio.wait([acquiring, releasing], return_when=asyncio.FIRST_COMPLETED)
            if released.is_set():
                raise _was_released(job)
        except BaseException:
            acquiring.add_done_callback(self._give_turn_back)
            acquiring.cancel()
            raise
        finally:
            releasing.cancel()

    def _give_turn_back(self, acquiring: asyncio.Future[Any]) -> None:
        """A turn that came just before it was no longer wanted."""
        if not acquiring.cancelled():
            self._slots.release()

    async def _alone(self, job: PrefillJob, released: asyncio.Event) -> AsyncGenerator[PrefillEvent, None]:
        async with Computation(self._engine, job.handoff_id, _request(job), released) as computation:
            token = await computation.first_token()
        yield token

    async def _hand_over(
        self, job: PrefillJob, partner: Partner, released: asyncio.Event
    ) -> AsyncGenerator[PrefillEvent, None]:
        connection = await self._partners.usable(partner)
        terms = make_terms(
            handoff_id=job.handoff_id,
            writer=self._life,
            reader=partner.life,
            contract=self._engine.contract,
            contract_digest=connection.sender.digest,
            token_ids=job.token_ids,
            table_length=job.table_length,
        )
        sent, ended = None, False
        try:
            async with connection.sender.reserved(terms, job.sampling.max_output_tokens) as handoff:
                yield Reserved(held_prefix_tokens=handoff.reservation.held_prefix_tokens)
                request = _request(job, handoff.places_to_show)
                async with Computation(self._engine, job.handoff_id, request, released) as computation:
                    first, sent = await computation.send(handoff)
            ended = True
        except DataLoss as error:
            self._partners.doubt(partner)
            if error.check in OF_CONTENT:
                self._engine.forget_prefixes()
            raise
        finally:
            self._count(sent, ended=ended)
        if sent is not None:
            yield _committed(sent)
        yield first

    def _count(self, sent: Sent | None, *, ended: bool) -> None:
        tally = self._tally
        if sent is not None:
            payload_bytes = tally.payload_bytes + sent.payload_bytes
            self._tally = replace(tally, committed=tally.committed + 1, payload_bytes=payload_bytes)
        elif not ended:
            self._tally = replace(tally, failed=tally.failed + 1)

    def _check(self, job: PrefillJob) -> None:
        if job.prefill != self._life:
            raise Fenced(
                f"prefill worker {self._life.worker} runs another life than the one that is meant",
                expected=self._life.incarnation.hex(),
                found=job.prefill.incarnation.hex(),
            )
        if self.draining:
            raise Unavailable(f"prefill worker {self._life.worker} is draining")
        if job.handoff_id in self._active or job.handoff_id in self._released:
            found = "an id in use" if job.handoff_id in self._active else "an id that was released"
            raise Fenced(
                f"handoff {job.handoff_id.hex()} can't be computed", expected="a new handoff id", found=found
            )


def _request(
    job: PrefillJob, choose_witnesses: Callable[[int], tuple[Place, ...]] | None = None
) -> SequenceRequest:
    return SequenceRequest(
        token_ids=job.token_ids,
        sampling=job.sampling,
        table_length=job.table_length,
        output_tokens_so_far=len(job.token_ids) - job.original_prompt_tokens,
        stop_after_first=True,
        hold_blocks=job.decode is not None,
        choose_witnesses=choose_witnesses,
    )


def _committed(sent: Sent) -> Committed:
    return Committed(
        payload_bytes=sent.payload_bytes,
        exactness=sent.receipt.exactness,
        handoff_s=sent.handoff_s,
        exposed_s=sent.exposed_s,
        max_abs_error=sent.receipt.max_abs_error,
    )


def _was_released(job: PrefillJob) -> Unavailable:
    return Unavailable(f"handoff {job.handoff_id.hex()} was released")
