"""A reader whose handoffs are captured: every one that is refused, fails or is committed becomes one file.

A handoff that is reserved and never pushed makes no file. A refused pair makes one for each contract.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from kvpact.clock import wall_time_ms
from kvpact.config import HandoffConfig
from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff.capture import Reserved
from kvpact.handoff.capture_codec import (
    Record,
    error_record,
    pair_records,
    push_record,
    receipt_record,
    reserve_records,
)
from kvpact.handoff.capture_folder import CaptureBounds, CaptureFolder, safe_name
from kvpact.handoff.capture_writer import CaptureWriter, Tape
from kvpact.handoff.messages import (
    Chunk,
    CommitReceipt,
    HandoffState,
    HandoffTerms,
    Open,
    PairAnswer,
    PairOffer,
    PushPart,
    Reservation,
)
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.transport_choice import GRPC
from kvpact.types import ContractDigest, HandoffId, VerdictWord, WorkerLife

logger = logging.getLogger(__name__)
KNOWN_PAIRS = 256
RESERVED = 1024
"""Most reservations that wait for their push; the oldest is forgotten first."""


class InliningPort(ReaderPort, Protocol):
    """A reader that can look into the regions of its running pushes."""

    def inline(self, chunk: Chunk) -> Chunk | None:
        """The chunk with its payload, as grpc would carry it; None where there is none."""


def capturing(port: InliningPort, handoff: HandoffConfig, worker: str) -> CapturingReaderPort | None:
    """A port that captures to the worker's own folder; None where the deployment asks for none."""
    if handoff.capture is None:
        return None
    path = handoff.capture / safe_name(worker)
    logger.warning("every handoff is written to %s, prompts included; handoff.capture asks for it", path)
    bounds = CaptureBounds(max_bytes=handoff.capture_max_bytes, max_files=handoff.capture_max_files)
    return CapturingReaderPort(port, CaptureWriter(CaptureFolder(path, bounds), now_ms=wall_time_ms))


class CapturingReaderPort:
    """Passes every call on to `port` and its answer back, whatever becomes of the capture."""

    def __init__(self, port: InliningPort, writer: CaptureWriter) -> None:
        self._port = port
        self._writer = writer
        self._pairs: OrderedDict[tuple[WorkerLife, ContractDigest], tuple[Record, Record]] = OrderedDict()
        self._refused: set[ContractDigest] = set()
        self._reserved: OrderedDict[HandoffId, Reserved] = OrderedDict()

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        answer = await self._port.pair(offer)
        records = pair_records(replace(offer, shm_trial=None), answer)
        key = (offer.writer, offer.contract_digest)
        self._pairs[key] = records
        self._pairs.move_to_end(key)
        if len(self._pairs) > KNOWN_PAIRS:
            self._pairs.popitem(last=False)
        if answer.verdict.word is VerdictWord.REJECT and offer.contract_digest not in self._refused:
            if len(self._refused) < KNOWN_PAIRS:
                self._refused.add(offer.contract_digest)
            tape = self._writer.begin(f"pair-{offer.contract_digest.hex()[:32]}")
            tape.add(records[:1])
            tape.end(records[1])
        return answer

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort."""
        kept = replace(terms, transport=GRPC)
        asked = Reserved(terms=kept, max_output_tokens=max_output_tokens, reservation=None)
        try:
            reservation = await self._port.reserve(terms, max_output_tokens)
        except KvpactError as error:
            tape = self._tape(asked)
            if tape is not None:
                tape.end(error_record(error))
            raise
        self._reserved[terms.handoff_id] = replace(asked, reservation=replace(reservation, nixl=None))
        if len(self._reserved) > RESERVED:
            self._reserved.popitem(last=False)
        return reservation

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort. A stream that its writer breaks off is kept with UNAVAILABLE."""
        run = _Push(self)
        try:
            async with aclosing(run.taped(parts)) as taped:
                receipt = await self._port.push(taped)
        except KvpactError as error:
            run.failed(error)
            raise
        except Exception:
            run.failed(KvpactError("internal error; the worker's log has it"))
            raise
        except BaseException:
            run.failed(Unavailable("the writer broke the push off"))
            raise
        run.committed(receipt)
        return receipt

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See ReaderPort."""
        return await self._port.renew(handoff_id, life)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See ReaderPort."""
        self._reserved.pop(handoff_id, None)
        return await self._port.release(handoff_id, reason, writer_stopped=writer_stopped)

    def inline(self, part: PushPart) -> PushPart | None:
        """The part as grpc would carry it; None where the payload isn't where it should be."""
        match part:
            case Open():
                return part.inline()
            case Chunk():
                return self._port.inline(part)
            case _:
                return part

    async def close(self) -> None:
        """Writes what waits for the disk. The port isn't closed."""
        await asyncio.to_thread(self._writer.close)

    def begin(self, handoff_id: HandoffId) -> Tape | None:
        """A capture of a push of a handoff that was reserved here; None for any other."""
        asked = self._reserved.get(handoff_id)
        return None if asked is None else self._tape(asked)

    def forget(self, handoff_id: HandoffId) -> None:
        """No other push of the handoff is kept."""
        self._reserved.pop(handoff_id, None)

    def _tape(self, asked: Reserved) -> Tape | None:
        """A capture up to its reservation; None where its pair isn't known."""
        pair = self._pairs.get((asked.terms.writer, asked.terms.contract_digest))
        if pair is None:
            return None
        tape = self._writer.begin(asked.terms.handoff_id.hex())
        tape.add(pair)
        tape.add(reserve_records(asked))
        return tape


class _Push:
    """One push on its way to the reader and to disk."""

    def __init__(self, port: CapturingReaderPort) -> None:
        self._port = port
        self._handoff_id: HandoffId | None = None
        self._tape: Tape | None = None
        self._part_count = 0
        self._keeps = True

    async def taped(self, parts: AsyncIterator[PushPart]) -> AsyncGenerator[PushPart, None]:
        """The parts, each queued for the disk before the reader gets it."""
        async for part in parts:
            if isinstance(part, Open) and self._part_count == 0:
                self._handoff_id = part.handoff_id
                self._tape = self._port.begin(part.handoff_id)
            self._part_count += 1
            self._keep(part)
            yield part

    def _keep(self, part: PushPart) -> None:
        """Queues the part. One without its payload will be refused, so nothing behind it is kept."""
        if self._tape is None or not self._keeps:
            return
        kept = self._port.inline(part)
        self._keeps = kept is not None
        if kept is not None:
            self._tape.add((push_record(kept),))

    def committed(self, receipt: CommitReceipt) -> None:
        """The reader took the handoff."""
        self._end(receipt_record(receipt))

    def failed(self, error: KvpactError) -> None:
        """The reader refused the push. One that it didn't let open leaves the handoff to its writer."""
        self._end(error_record(error), kept=self._part_count == 1)

    def _end(self, record: Record, *, kept: bool = False) -> None:
        if self._tape is not None:
            self._tape.end(record)
        if self._handoff_id is not None and not kept:
            self._port.forget(self._handoff_id)
