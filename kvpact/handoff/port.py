"""The reader of a handoff as its writer sees it; every transport gives one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvpact.handoff.messages import (
    CommitReceipt,
    HandoffState,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    PushPart,
    Reservation,
)
from kvpact.types import HandoffId, WorkerLife


class ReaderPort(Protocol):
    """All failures are KvpactErrors: the same class and facts over every transport."""

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """Offers a contract; a refusal is a normal answer.

        Raises:
            BadRequest: the contract is malformed or names no identity.
            Fenced: another life of the reader is meant.
        """

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """Sets blocks aside, all or nothing; idempotent by handoff id.

        Raises:
            ContractRefused, BadRequest, Fenced, Exhausted, Unavailable.
        """

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """Sends open, chunk*, commit; once per handoff. On any failure the reader frees its blocks.

        Raises:
            DataLoss, BadRequest, Fenced, UnknownHandoff, Unavailable.
        """

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """Extends the lease; seconds from now on.

        Raises:
            UnknownHandoff, Fenced, Unavailable.
        """

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """Gives the handoff up at any state; idempotent. The state before, None where it was never known.

        `writer_stopped`: its writer asks and writes no more into the region that the reader granted.
        """
