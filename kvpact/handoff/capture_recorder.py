"""A ReaderPort that keeps what goes through it, and gives each handoff out as a capture when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from kvpact.errors import KvpactError
from kvpact.handoff.capture import Capture, Reserved
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
from kvpact.types import HandoffId, VerdictWord, WorkerLife

OnCapture = Callable[[Capture], None]


class ClosablePort(ReaderPort, Protocol):
    """A port with something to close."""

    async def close(self) -> None:
        """Ends the connection. Idempotent."""


class RecordingReaderPort:
    """Passes every call on to `port`; `on_capture` is called once per refused pair and per ended push.

    A handoff that was reserved and released without a push isn't given out. Bytes of chunks are copied.
    """

    def __init__(self, port: ClosablePort, on_capture: OnCapture) -> None:
        self._port = port
        self._on_capture = on_capture
        self._paired: Capture | None = None
        self._reserved: dict[HandoffId, Capture] = {}

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        answer = await self._port.pair(offer)
        self._paired = Capture(offer=replace(offer, shm_trial=None), answer=answer)
        if answer.verdict.word is VerdictWord.REJECT:
            self._on_capture(self._paired)
        return answer

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort."""
        kept = replace(terms, transport=GRPC)
        asked = Reserved(terms=kept, max_output_tokens=max_output_tokens, reservation=None)
        try:
            reservation = await self._port.reserve(terms, max_output_tokens)
        except KvpactError as error:
            if self._paired is not None:
                self._on_capture(replace(self._paired, reserved=asked, error=error))
            raise
        if self._paired is not None:
            granted = replace(asked, reservation=replace(reservation, nixl=None))
            self._reserved[terms.handoff_id] = replace(self._paired, reserved=granted)
        return reservation

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort."""
        seen: list[PushPart] = []
        try:
            receipt = await self._port.push(_kept(parts, seen))
        except KvpactError as error:
            self._end(seen, error=error)
            raise
        self._end(seen, receipt=receipt)
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

    async def close(self) -> None:
        """Closes the port."""
        await self._port.close()

    def _end(
        self, seen: list[PushPart], *, receipt: CommitReceipt | None = None, error: KvpactError | None = None
    ) -> None:
        opened = seen[0] if seen else None
        capture = self._reserved.pop(opened.handoff_id, None) if isinstance(opened, Open) else None
        if capture is not None:
            self._on_capture(replace(capture, parts=tuple(seen), receipt=receipt, error=error))


async def _kept(parts: AsyncIterator[PushPart], seen: list[PushPart]) -> AsyncIterator[PushPart]:
    async for part in parts:
        seen.append(part.inline() if isinstance(part, Open | Chunk) else part)
        yield part
