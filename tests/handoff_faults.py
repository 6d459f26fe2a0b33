"""A road between a writer and a reader on which one message goes wrong, by a script.

The road is a ReaderPort around another one; handoff_proxy has one that acts on messages of real gRPC calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from kvpact.errors import Unavailable
from kvpact.handoff.messages import (
    Chunk,
    Commit,
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
from kvpact.types import HandoffId, WorkerLife

M = TypeVar("M")
T = TypeVar("T")
CHUNKS = 6
"""Of the handoff that the fault table sends: 3 blocks, one layer and one block a chunk, 2 layers."""


class Step(StrEnum):
    """A moment in the life of a handoff. AFTER is everything behind the commit's arrival."""

    PAIR = "pair"
    RESERVE = "reserve"
    OPEN = "open"
    CHUNK_0 = "chunk 0"
    CHUNK_1 = "chunk 1"
    CHUNK_2 = "chunk 2"
    CHUNK_3 = "chunk 3"
    CHUNK_4 = "chunk 4"
    CHUNK_5 = "chunk 5"
    COMMIT = "commit"
    AFTER = "after commit"


class Fault(StrEnum):
    """What happens there."""

    LOST = "lost"
    TWICE = "twice"
    REORDERED = "reordered"
    CORRUPTED = "corrupted"
    STALLED = "stalled"
    SENDER_DIES = "sender dies"
    RECEIVER_DIES = "receiver dies"
    CANCELLED = "cancelled"


PUSHED = (Step.OPEN, *(step for step in Step if step.name.startswith("CHUNK")), Step.COMMIT)
"""Steps that are one message of a push, in order."""
CHUNK_STEPS = PUSHED[1:-1]
HALTING = (Fault.STALLED, Fault.SENDER_DIES, Fault.CANCELLED)
"""Faults at which the road waits for the test."""


@dataclass(slots=True, kw_only=True)
class Script:
    """The one fault of a road, and what the road saw."""

    step: Step | None = None
    fault: Fault | None = None
    kill: Callable[[], None] = lambda: None
    """Ends the reader's process life."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """The message of the step is on the road."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets a message that stalled go on."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing passes any more."""
    sent: list[Any] = field(default_factory=list)
    """Messages of pushes as the writer sent them."""
    late: list[asyncio.Future[Any]] = field(default_factory=list)
    """Calls that were delivered after their caller had given up."""

    def heal(self) -> None:
        """The road is as good as new; what is on it stays lost."""
        self.step = self.fault = None
        self.cut, self.sent = asyncio.Event(), []

    def forget(self) -> None:
        """Lets go of what was sent: its payloads may lie in memory that the road shares."""
        self.sent.clear()

    async def call(
        self,
        step: Step | None,
        send: Callable[[M], Awaitable[T]],
        message: M,
        corrupt: Callable[[M], M],
    ) -> T:
        """One call with one answer."""
        self._refuse_when_cut()
        if step is None or step is not self.step:
            return await self.race(asyncio.ensure_future(send(message)))
        if self.fault in (Fault.SENDER_DIES, Fault.CANCELLED):
            await send(message)
            self.reached.set()
            await self.race(asyncio.ensure_future(asyncio.Event().wait()))
        self.reached.set()
        match self.fault:
            case Fault.LOST:
                raise Unavailable("the message was lost")
            case Fault.TWICE:
                await send(message)
            case Fault.CORRUPTED:
                return await send(corrupt(message))
            case Fault.STALLED:
                self.late.append(asyncio.ensure_future(self._deliver_late(send, message)))
                raise Unavailable("no answer in time")
            case Fault.RECEIVER_DIES:
                self._die()
                self._refuse_when_cut()
        return await self.race(asyncio.ensure_future(send(message)))

    async def parts(self, source: AsyncIterator[M], corrupt: Callable[[M], M]) -> AsyncGenerator[M, None]:
        """The messages of a push, with the fault among them."""
        held: list[M] = []
        number = -1
        async for message in source:
            number += 1
            self.sent.append(message)
            here = self.step in PUSHED and self._at(number)
            for each in await self._pass_on(message, corrupt) if here else (message,):
                yield each
            if here and self.fault is Fault.REORDERED:
                held.append(message)
            elif held:
                yield held.pop()
        for message in held:
            yield message

    async def race(self, work: asyncio.Future[T]) -> T:
        """Awaits work; a road that is cut ends it."""
        cutting = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait([work, cutting], return_when=asyncio.FIRST_COMPLETED)
            self._refuse_when_cut()
            return await work
        finally:
            for each in (work, cutting):
                each.cancel()
            await asyncio.gather(work, cutting, return_exceptions=True)

    async def settle(self) -> list[Any]:
        """Lets what stalled arrive; what came of it."""
        self.go.set()
        return await asyncio.gather(*self.late, return_exceptions=True)

    def answered(self, receipt: T) -> T:
        """The answer to a commit on its way back; where the sender dies, nothing follows either."""
        if self.step is Step.AFTER and self.fault in (Fault.LOST, Fault.SENDER_DIES):
            if self.fault is Fault.SENDER_DIES:
                self.cut.set()
            raise Unavailable("the answer was lost")
        return receipt

    def _at(self, number: int) -> bool:
        """Whether message `number` is the step's. A commit trades places with the chunk before it."""
        index = PUSHED.index(self.step) if self.step is not None else -1
        return number == (index - 1 if (self.step, self.fault) == (Step.COMMIT, Fault.REORDERED) else index)

    async def _pass_on(self, message: M, corrupt: Callable[[M], M]) -> tuple[M, ...]:
        self.reached.set()
        match self.fault:
            case Fault.LOST | Fault.REORDERED:
                return ()
            case Fault.TWICE:
                return message, message
            case Fault.CORRUPTED:
                return (corrupt(message),)
            case Fault.STALLED:
                await self.go.wait()
                return (message,)
            case Fault.RECEIVER_DIES:
                self._die()
        await asyncio.Event().wait()
        raise AssertionError("nothing ends this wait but a cancellation")

    async def _deliver_late(self, send: Callable[[M], Awaitable[T]], message: M) -> T:
        await self.go.wait()
        return await send(message)

    def _die(self) -> None:
        self.kill()
        self.cut.set()

    def _refuse_when_cut(self) -> None:
        if self.cut.is_set():
            raise Unavailable("the road is cut")


class FaultyPort:
    """See ReaderPort: another port behind a script."""

    def __init__(self, port: ReaderPort, script: Script) -> None:
        self._port = port
        self._script = script

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        return await self._script.call(Step.PAIR, self._port.pair, offer, corrupt_offer)

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort."""
        return await self._script.call(
            Step.RESERVE, lambda each: self._port.reserve(each, max_output_tokens), terms, corrupt_terms
        )

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort."""
        script = self._script
        script._refuse_when_cut()
        pushing = asyncio.ensure_future(self._port.push(script.parts(parts, corrupt_part)))
        return script.answered(await script.race(pushing))

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See ReaderPort."""
        return await self._script.call(None, lambda each: self._port.renew(each, life), handoff_id, _as_it_is)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See ReaderPort."""

        async def send(message: HandoffId) -> HandoffState | None:
            return await self._port.release(message, reason, writer_stopped=writer_stopped)

        return await self._script.call(None, send, handoff_id, _as_it_is)

    async def close(self) -> None:
        """The port inside belongs to whoever made it."""


def corrupt_offer(offer: PairOffer) -> PairOffer:
    """One bit of the contract flipped."""
    return replace(offer, contract=flipped(offer.contract, len(offer.contract) // 2))


def corrupt_terms(terms: HandoffTerms) -> HandoffTerms:
    """Another first prompt token."""
    return replace(terms, token_ids=(terms.token_ids[0] ^ 1, *terms.token_ids[1:]))


def corrupt_part(part: PushPart) -> PushPart:
    """Another contract digest, one bit of the payload flipped, or other totals."""
    match part:
        case Open():
            return replace(part, contract_digest=type(part.contract_digest)(flipped(part.contract_digest)))
        case Chunk(region_offset=int()):  # its bytes are on their way beside the messages
            return replace(part, checksum=part.checksum ^ 1)
        case Chunk():
            return replace(part, values=flipped(bytes(part.values)))
        case Commit():
            return replace(part, payload_bytes=part.payload_bytes ^ 1)


def flipped(data: bytes, index: int = -1) -> bytes:
    """`data` with the lowest bit of one byte flipped; the last byte's by default."""
    changed = bytearray(data)
    changed[index] ^= 1
    return bytes(changed)


def _as_it_is(message: M) -> M:
    return message
