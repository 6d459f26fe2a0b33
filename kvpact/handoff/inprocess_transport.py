"""The in-process transport: writer and receiver share an event loop; only the contract is serialised."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
from kvpact.handoff.receiver import Receiver
from kvpact.types import HandoffId, WorkerLife


class InProcessReaderPort:
    """A ReaderPort of one receiver, for writers that run beside it."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        return await self._receiver.pair(offer)

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort."""
        return await self._receiver.reserve(terms, max_output_tokens)

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort."""
        return await self._receiver.push(_owned(parts))

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See ReaderPort."""
        return await self._receiver.renew(handoff_id, life)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See ReaderPort."""
        return await self._receiver.release(handoff_id, reason, writer_stopped=writer_stopped)

    async def close(self) -> None:
        """Nothing to close: the receiver belongs to its worker."""


async def _owned(parts: AsyncIterator[PushPart]) -> AsyncIterator[PushPart]:
    """Payloads as a message holds them: a landing may look at one after the writer gave its cache back."""
    async for part in parts:
        yield part.inline() if isinstance(part, Chunk) and part.region_offset is None else part
