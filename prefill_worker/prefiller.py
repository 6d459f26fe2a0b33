"""Runs prompts: reserves on the decode worker, computes, hands over, and tells how it went."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from kvpact.engine.engine import Engine
from kvpact.errors import Fenced, Unavailable
from kvpact.handoff.terms import make_terms
from kvpact.types import HandoffId, WorkerLife
from prefill_worker.computation import Computation
from prefill_worker.jobs import Committed, Partner, PrefillEvent, PrefillJob, Reserved
from prefill_worker.partners import Partners


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
        self._computing: dict[HandoffId, Computation] = {}
        self._jobs = 0
        self.draining = False
        self._tally = Tally()

    async def prefill(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        """Reserved, Committed, FirstToken; no Committed without a partner or if that token ends it.

        Leaving the generator early cancels the computation and releases the reservation.

        Raises:
            Fenced: another life of this worker is meant.
            ContractRefused: the partner refuses this worker's cache; nothing was computed.
            KvpactError: the reader's answer, or what the engine failed with.
        """
        self._check(job)
        self._jobs += 1
        try:
            async with self._slots:
                work = self._alone(job) if job.decode is None else self._hand_over(job, job.decode)
                async with contextlib.aclosing(work) as events:
                    async for event in events:
                        yield event
        finally:
            self._jobs -= 1

    def give_up(self, handoff_id: HandoffId) -> bool:
        """Ends the computation of a handoff; whether one ran."""
        computation = self._computing.get(handoff_id)
        if computation is not None:
            computation.fail(Unavailable(f"handoff {handoff_id.hex()} was released"))
        return computation is not None

    def drain(self) -> int:
        """Takes no new prompts; how many still run."""
        self.draining = True
        return self._jobs

    def jobs(self) -> int:
        """Prompts that run or wait."""
        return self._jobs

    def tally(self) -> Tally:
        """How handoffs ended so far."""
        return self._tally

    async def _alone(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        async with self._computation(job) as computation:
            token = await computation.first_token()
        yield token

    async def _hand_over(self, job: PrefillJob, partner: Partner) -> AsyncGenerator[PrefillEvent, None]:
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
        committed, ended = None, False
        try:
            async with connection.sender.reserved(terms, job.sampling.max_output_tokens) as handoff:
                yield Reserved(held_prefix_tokens=handoff.reservation.held_prefix_tokens)
                async with self._computation(job) as computation:
                    first, committed = await computation.send(handoff)
            ended = True
        finally:
            self._count(committed, ended=ended)
        if committed is not None:
            yield committed
        yield first

    def _count(self, committed: Committed | None, *, ended: bool) -> None:
        tally = self._tally
        if committed is not None:
            payload_bytes = tally.payload_bytes + committed.payload_bytes
            self._tally = replace(tally, committed=tally.committed + 1, payload_bytes=payload_bytes)
        elif not ended:
            self._tally = replace(tally, failed=tally.failed + 1)

    @contextlib.asynccontextmanager
    async def _computation(self, job: PrefillJob) -> AsyncIterator[Computation]:
        async with Computation(self._engine, job) as computation:
            self._computing[job.handoff_id] = computation
            try:
                yield computation
            finally:
                del self._computing[job.handoff_id]

    def _check(self, job: PrefillJob) -> None:
        if job.prefill != self._life:
            raise Fenced(
                f"prefill worker {self._life.worker} runs another life than the one that is meant",
                expected=self._life.incarnation.hex(),
                found=job.prefill.incarnation.hex(),
            )
        if self.draining:
            raise Unavailable(f"prefill worker {self._life.worker} is draining")
        if job.handoff_id in self._computing:
            raise Fenced(
                f"handoff {job.handoff_id.hex()} is being computed already",
                expected="a new handoff id",
                found="an id in use",
            )
