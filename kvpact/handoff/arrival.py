"""One push as it arrives: each part is checked, then its bytes land on an executor thread in stream order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from kvpact.errors import BadRequest, DataLoss, Fenced
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.handoff_table import HandoffTable, HeldHandoff
from kvpact.handoff.landing import Landing
from kvpact.handoff.messages import CanaryOutcome, Chunk, Commit, CommitReceipt, Open, PushPart
from kvpact.handoff.pairing import PairBook
from kvpact.handoff.trust import CanaryJudge, Landed, Verifier

LIES = frozenset({"checksum", "witness"})
"""Failed checks after which a pair proves itself anew; others can come of a stream that broke."""


class Arrival:
    """Takes pushes in. The next chunk is read while one lands; one landing of a handoff at a time."""

    def __init__(
        self,
        *,
        table: HandoffTable,
        pairs: PairBook,
        landing: Landing,
        verifier: Verifier,
        judge: CanaryJudge | None,
        executor: Executor | None,
    ) -> None:
        self._table = table
        self._pairs = pairs
        self._landing = landing
        self._verifier = verifier
        self._judge = judge
        self._executor = executor

    async def take_in(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """From open to commit. On any failure, cancellation included, the handoff ends at once.

        Raises:
            DataLoss, BadRequest, Fenced, UnknownHandoff.
        """
        handoff = await self._open(parts)
        try:
            return await self._receive_while_held(handoff, parts)
        except BaseException as error:
            if isinstance(error, DataLoss) and error.check in LIES:
                self._pairs.doubt(handoff.terms)
            self._table.end(handoff, str(error) or type(error).__name__)
            raise

    async def _open(self, parts: AsyncIterator[PushPart]) -> HeldHandoff:
        """The handoff that the first part opens. A failure here leaves the handoff to its rightful writer."""
        first = await anext(parts, None)
        if not isinstance(first, Open):
            raise BadRequest("a push begins with open", param="push.part")
        handoff = self._table.find(first.handoff_id)
        handoff.session = handoff.session.open(first)
        return handoff

    async def _receive_while_held(
        self, handoff: HeldHandoff, parts: AsyncIterator[PushPart]
    ) -> CommitReceipt:
        """Stops receiving when the handoff ends; after an error of the stream, waits for the running job."""
        try:
            async with asyncio.timeout(None) as handoff.scope:
                return await self._receive(handoff, parts)
        except TimeoutError:
            if handoff.ended is not None:
                self._table.find(handoff.terms.handoff_id)
            raise
        except Exception:
            handoff.scope = None
            if handoff.ended is None and handoff.work is not None:
                await asyncio.wait([handoff.work])
            raise
        finally:
            handoff.scope = None

    async def _receive(self, handoff: HeldHandoff, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        self._start(handoff, partial(self._prepare, handoff))
        async for part in parts:
            match part:
                case Chunk(header=header, keys=keys, values=values):
                    await self._settle(handoff)
                    handoff.session = handoff.session.arrive(header, len(keys), len(values))
                    self._start(handoff, partial(_verify_and_land, handoff, part))
                case Commit():
                    return await self._commit(handoff, part)
                case Open():
                    raise Fenced("a push is opened once", expected="chunk or commit", found="a second open")
        raise DataLoss("the stream ended without commit", check="totals")

    async def _commit(self, handoff: HeldHandoff, commit: Commit) -> CommitReceipt:
        await self._settle(handoff)
        handoff.session.close(commit)
        self._start(handoff, partial(self._finish, handoff, commit))
        await self._settle(handoff)
        receipt = _receipt(handoff)
        if not handoff.terms.canary:
            self._table.commit(handoff, commit)
            return receipt
        outcome = await self._judged(handoff, commit)
        self._pairs.probed(handoff.terms, passed=outcome.passed)
        self._table.end_canary(handoff)
        return replace(receipt, canary=outcome)

    async def _judged(self, handoff: HeldHandoff, commit: Commit) -> CanaryOutcome:
        """Gives the blocks to the judge; the handoff stays held until it is done, so that renewals work."""
        assert self._judge is not None, "a canary gets no room without a judge"
        blocks = self._table.lend(handoff, "canary")
        return await self._judge.judge(handoff.judged.contract, handoff.terms, blocks, commit.first_token_id)

    def _start(self, handoff: HeldHandoff, job: Callable[[], None]) -> None:
        """Starts a job; the one before it is settled."""
        handoff.work = asyncio.get_running_loop().run_in_executor(self._executor, job)

    async def _settle(self, handoff: HeldHandoff) -> None:
        """Waits for the running job and raises what it raised. Being cancelled doesn't stop the job.

        Raises:
            UnknownHandoff: the handoff ended meanwhile, so its blocks may not be ours any more.
        """
        if handoff.work is not None:
            await asyncio.shield(handoff.work)
        if handoff.ended is not None:
            self._table.find(handoff.terms.handoff_id)

    def _prepare(self, handoff: HeldHandoff) -> None:
        judged = handoff.judged
        handoff.handle = self._landing.prepare(judged.contract, judged.verdict, handoff.terms, handoff.blocks)

    def _finish(self, handoff: HeldHandoff, commit: Commit) -> None:
        """Zeroes the tail and checks the witnesses; nothing of the handoff is visible before."""
        assert handoff.handle is not None, "prepare comes first"
        handoff.handle.finish(len(handoff.terms.token_ids))
        landed = Landed(
            writer=handoff.judged.contract,
            terms=handoff.terms,
            nonce=handoff.reservation.nonce,
            first_computed=handoff.reservation.held_prefix_tokens,
            blocks=handoff.blocks,
        )
        handoff.witnessed = self._verifier.verify(landed, commit.witnesses)


def _verify_and_land(handoff: HeldHandoff, chunk: Chunk) -> None:
    terms, header = handoff.terms, chunk.header
    found = chunk_checksum(header, terms.contract_digest, terms.token_digest, chunk.keys, chunk.values)
    if found != chunk.checksum:
        raise DataLoss(
            f"chunk {header.sequence} of layer {header.layer}: checksum is {found:016x}, "
            f"the writer sent {chunk.checksum:016x}",
            check="checksum",
        )
    assert handoff.handle is not None, "prepare comes first"
    handoff.handle.land(header, chunk.keys, chunk.values)


def _receipt(handoff: HeldHandoff) -> CommitReceipt:
    verdict, report, handle = handoff.judged.verdict, handoff.witnessed, handoff.handle
    assert report is not None, "a receipt follows the check"
    assert handle is not None, "a receipt follows the landing"
    return CommitReceipt(
        exactness=verdict.exactness,
        max_abs_error=handle.max_abs_error,
        plan=verdict.plan,
        witnesses=report,
    )
