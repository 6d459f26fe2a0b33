"""One push as it arrives: each part is checked, then its bytes land on an executor thread in stream order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

from kvpact.errors import BadRequest, DataLoss, Fenced, KvpactError
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.handoff_table import HandoffTable, HeldHandoff
from kvpact.handoff.held_prefix import HeldPrefixes
from kvpact.handoff.landing import Landing
from kvpact.handoff.lane import Lane
from kvpact.handoff.messages import CanaryOutcome, Chunk, Commit, CommitReceipt, Open, PushPart
from kvpact.handoff.pairing import PairBook
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.region_layout import region_bytes
from kvpact.handoff.regions import Region
from kvpact.handoff.trust import CanaryJudge, Landed, Verifier
from kvpact.types import HandoffId

LIES = frozenset({"checksum", "witness"})
"""Failed checks after which a pair proves itself anew; others can come of a stream that broke."""
CHUNKS_AHEAD = 3
"""Chunks that wait or land while the stream is read on; each holds its payload."""
IN_REGION_AHEAD = 32
"""The same for chunks whose payloads lie in a region already."""


@dataclass(slots=True, kw_only=True)
class _Push:
    """One push while it runs."""

    handoff: HeldHandoff
    lane: Lane
    region: Region | None = None
    looking: threading.Lock = field(default_factory=threading.Lock)
    """Held while a view of the region is made."""


class Arrival:
    """Takes pushes in. Next chunks are read while one lands; one landing of a handoff at a time."""

    def __init__(
        self,
        *,
        table: HandoffTable,
        pairs: PairBook,
        landing: Landing,
        verifier: Verifier,
        judge: CanaryJudge | None,
        executor: Executor | None,
        prefixes: HeldPrefixes | None = None,
        transports: ReaderTransports | None = None,
    ) -> None:
        self._table = table
        self._pairs = pairs
        self._landing = landing
        self._verifier = verifier
        self._judge = judge
        self._executor = executor
        self._prefixes = prefixes
        self._transports = transports or ReaderTransports()
        self._running: dict[HandoffId, _Push] = {}
        """Pushes that opened a region."""

    async def take_in(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """From open to commit. On any failure, cancellation included, the handoff ends at once.

        Raises:
            DataLoss, BadRequest, Fenced, UnknownHandoff.
        """
        handoff, opened = await self._open(parts)
        push = _Push(handoff=handoff, lane=Lane(self._executor))
        try:
            self._open_region(push, opened)
            return await self._receive_while_held(push, parts)
        except BaseException as error:
            if isinstance(error, DataLoss) and error.check in LIES:
                self._doubt(handoff)
            self._table.end(handoff, str(error) or type(error).__name__)
            raise
        finally:
            self._running.pop(handoff.terms.handoff_id, None)
            _close_region(push, reusable=handoff.ended is None)

    async def _open(self, parts: AsyncIterator[PushPart]) -> tuple[HeldHandoff, Open]:
        """The handoff that the first part opens. A failure here leaves the handoff to its rightful writer."""
        first = await anext(parts, None)
        if not isinstance(first, Open):
            raise BadRequest("a push begins with open", param="push.part")
        handoff = self._table.find(first.handoff_id)
        handoff.session = handoff.session.open(first)
        return handoff, first

    def _open_region(self, push: _Push, opened: Open) -> None:
        expected = push.handoff.session.expected
        size_bytes = region_bytes(expected.layers, expected.block_count)
        push.region = self._transports.open(opened, push.handoff.terms, size_bytes)
        if push.region is not None:
            self._running[opened.handoff_id] = push

    def inline(self, chunk: Chunk) -> Chunk | None:
        """A chunk of a running push with a payload of its own; None where its region doesn't hold it."""
        header, push = chunk.header, self._running.get(chunk.header.handoff_id)
        if chunk.region_offset is None:
            return chunk
        if push is None or push.region is None:
            return None
        try:
            push.region.check(chunk.region_offset, header.key_bytes + header.value_bytes)
        except BadRequest:
            return None
        with push.looking:
            payload = push.region.view(chunk.region_offset, header.key_bytes + header.value_bytes)
        data = payload.tobytes()
        payload.release()
        keys, values = data[: header.key_bytes], data[header.key_bytes :]
        return replace(chunk, keys=keys, values=values, region_offset=None)

    async def _receive_while_held(self, push: _Push, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """Stops receiving when the handoff ends; after an error of the stream, waits for the running job."""
        handoff = push.handoff
        try:
            async with asyncio.timeout(None) as handoff.scope:
                return await self._receive(push, parts)
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

    async def _receive(self, push: _Push, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        handoff, lane = push.handoff, push.lane
        handoff.work = lane.put(partial(self._prepare, handoff))
        async for part in parts:
            match part:
                case Chunk():
                    await lane.room(CHUNKS_AHEAD if part.region_offset is None else IN_REGION_AHEAD)
                    await self._check(push, part)
                    brief = part.region_offset is None and handoff.handle is not None and handoff.handle.brief
                    handoff.work = lane.put(partial(_verify_and_land, push, part), brief=brief)
                case Commit():
                    return await self._commit(push, part)
                case Open():
                    raise Fenced("a push is opened once", expected="chunk or commit", found="a second open")
        await self._settle(push)
        raise DataLoss("the stream ended without commit", check="totals")

    async def _check(self, push: _Push, chunk: Chunk) -> None:
        """Refuses a chunk by what its header says; what an earlier one did wrong comes out first."""
        handoff, header = push.handoff, chunk.header
        if handoff.ended is not None:
            self._table.find(handoff.terms.handoff_id)
        key_bytes, value_bytes = len(chunk.keys), len(chunk.values)
        try:
            if chunk.region_offset is not None:
                if push.region is None:
                    raise BadRequest(
                        "chunk.region_offset is set; this push opened no region", param="chunk.region_offset"
                    )
                key_bytes, value_bytes = header.key_bytes, header.value_bytes
            handoff.session = handoff.session.arrive(header, key_bytes, value_bytes)
            if chunk.region_offset is not None and push.region is not None:
                push.region.check(chunk.region_offset, key_bytes + value_bytes)
        except KvpactError:
            await self._settle(push)
            raise

    async def _commit(self, push: _Push, commit: Commit) -> CommitReceipt:
        handoff = push.handoff
        await self._settle(push)
        handoff.session.close(commit)
        handoff.work = push.lane.put(partial(self._finish, handoff, commit))
        await self._settle(push)
        receipt = _receipt(handoff)
        self._transports.writer_stopped(handoff.terms.handoff_id)
        if not handoff.terms.canary:
            cached = () if self._prefixes is None else self._prefixes.entries(handoff)
            self._table.commit(handoff, commit, cached)
            return receipt
        outcome = await self._judged(handoff, commit)
        if not outcome.passed:
            self._doubt(handoff)
        self._pairs.probed(handoff.terms, passed=outcome.passed)
        self._table.end_canary(handoff)
        return replace(receipt, canary=outcome)

    def _doubt(self, handoff: HeldHandoff) -> None:
        """The pair proves itself anew, and nothing that the writer's life landed here is reused."""
        self._pairs.doubt(handoff.terms)
        self._table.forget(handoff.terms.writer)

    async def _judged(self, handoff: HeldHandoff, commit: Commit) -> CanaryOutcome:
        """Gives the blocks to the judge; the handoff stays held until it is done, so that renewals work."""
        assert self._judge is not None, "a canary gets no room without a judge"
        blocks = self._table.lend(handoff, "canary")
        return await self._judge.judge(handoff.judged.contract, handoff.terms, blocks, commit.first_token_id)

    async def _settle(self, push: _Push) -> None:
        """Waits for all jobs and raises what one raised. Being cancelled doesn't stop them.

        Raises:
            UnknownHandoff: the handoff ended meanwhile, so its blocks may not be ours any more.
        """
        await push.lane.room(1)
        if push.handoff.ended is not None:
            self._table.find(push.handoff.terms.handoff_id)

    def _prepare(self, handoff: HeldHandoff) -> None:
        judged = handoff.judged
        handoff.handle = self._landing.prepare(
            judged.contract,
            judged.verdict,
            handoff.terms,
            handoff.blocks,
            held_tokens=handoff.reservation.held_prefix_tokens,
        )

    def _finish(self, handoff: HeldHandoff, commit: Commit) -> None:
        """Zeroes the tail and checks the witnesses; nothing of the handoff is visible before."""
        assert handoff.handle is not None, "prepare comes first"
        handoff.handle.finish(len(handoff.terms.token_ids))
        landed = Landed(
            writer=handoff.judged.contract,
            terms=handoff.terms,
            nonce=handoff.reservation.nonce,
            first_computed=commit.first_computed_tokens,
            held=handoff.reservation.held_prefix_tokens,
            blocks=handoff.blocks,
        )
        handoff.witnessed = self._verifier.verify(landed, commit.witnesses)


def _verify_and_land(push: _Push, chunk: Chunk) -> None:
    """Nothing, where the handoff ended meanwhile."""
    header = chunk.header
    if push.handoff.ended is not None:
        return
    if chunk.region_offset is None or push.region is None:
        _land(push.handoff, chunk, chunk.keys, chunk.values)
        return
    with push.looking:
        payload = push.region.view(chunk.region_offset, header.key_bytes + header.value_bytes)
    keys, values = payload[: header.key_bytes], payload[header.key_bytes :]
    try:
        _land(push.handoff, chunk, keys, values)
    finally:
        for view in (keys, values, payload):
            with contextlib.suppress(BufferError):
                view.release()


def _land(handoff: HeldHandoff, chunk: Chunk, keys: bytes | memoryview, values: bytes | memoryview) -> None:
    terms, header = handoff.terms, chunk.header
    found = chunk_checksum(header, terms.contract_digest, terms.token_digest, keys, values)
    if found != chunk.checksum:
        raise DataLoss(
            f"{header}: checksum is {found:016x}, the writer sent {chunk.checksum:016x}",
            check="checksum",
        )
    assert handoff.handle is not None, "prepare comes first"
    handoff.handle.land(header, keys, values)


def _close_region(push: _Push, *, reusable: bool) -> None:
    """Once no thread looks into it any more."""
    region, work = push.region, push.handoff.work
    if region is None:
        return
    if work is None or work.done():
        region.close(reusable=reusable)
    else:
        work.add_done_callback(lambda _: region.close(reusable=False))


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
