"""One handoff as it went over the wire, from the offer of a contract to the receipt or the error."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.contract.contract import Contract
from kvpact.errors import KvpactError
from kvpact.handoff.codec import contract_from_bytes
from kvpact.handoff.messages import (
    Chunk,
    Commit,
    CommitReceipt,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    PushPart,
    Reservation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What was asked for, and the grant; None where the reader refused it."""

    terms: HandoffTerms
    max_output_tokens: int
    reservation: Reservation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What writer and reader of one handoff said to each other, in order.

    It ends as the handoff did: with the answer of a reader that refuses, with `error`, or with `receipt`.
    """

    offer: PairOffer
    answer: PairAnswer
    reserved: Reserved | None = None
    parts: tuple[PushPart, ...] = ()
    receipt: CommitReceipt | None = None
    error: KvpactError | None = None

    def writer_contract(self) -> Contract:
        """The contract that was offered. Raises BadRequest where its bytes are none."""
        return contract_from_bytes(self.offer.contract, schema_major=self.offer.schema_major)

    def chunks(self) -> tuple[Chunk, ...]:
        """Pushed chunks in order."""
        return tuple(part for part in self.parts if isinstance(part, Chunk))

    def commit(self) -> Commit | None:
        """The last part of a whole push."""
        last = self.parts[-1] if self.parts else None
        return last if isinstance(last, Commit) else None
