"""One push as it arrives: each part is checked, then its bytes land on an executor thread in stream order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial

from kvpact.errors import BadRequest, DataLoss, Fenced
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.handoff_table import HandoffTable, HeldHandoff
from kvpact.handoff.landing import Landing
from kvpact.handoff.messages import Chunk, Commit, CommitReceipt, Open, PushPart


class Arrival:
    """Takes pushes in. The next chunk is read while one lands; one landing of a handoff at a time."""

    def __init__(self, *, table: HandoffTable, landing: Landing, executor: Executor | None) -> None:
        self._table = table
        self._landing = landing
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
        self._start(handoff, partial(_finish, handoff))
        await self._settle(handoff)
        self._table.commit(handoff, commit)
        verdict = handoff.judged.verdict
        return CommitReceipt(exactness=verdict.exactness, max_abs_error=None, plan=verdict.plan)

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


def _finish(handoff: HeldHandoff) -> None:
    assert handoff.handle is not None, "prepare comes first"
    handoff.handle.finish(len(handoff.terms.token_ids))
