"""What a reader proves of a handoff before it counts; the decode worker implements it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpact.contract.contract import Contract
from kvpact.handoff.messages import CanaryOutcome, HandoffTerms, Witness, WitnessReport
from kvpact.types import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A handoff whose bytes all landed and that nobody may see yet."""

    writer: Contract
    terms: HandoffTerms
    nonce: bytes
    first_computed: int
    """First token that the writer computed; it took those before it from its own cache."""
    held: int
    """Tokens that the reader held, in whole blocks of both sides, and that weren't sent."""
    blocks: tuple[BlockId, ...]
    """Hold the prompt in order, in the reader's block size; still the receiver's."""


class Verifier(Protocol):
    """Checks witnesses."""

    def verify(self, landed: Landed, witnesses: Sequence[Witness]) -> WitnessReport:
        """Called once per handoff on an executor thread, after the last byte landed.

        Raises:
            DataLoss: a row is missing, or isn't what landed, or doesn't turn by the reader's own table.
        """


class CanaryJudge(Protocol):
    """Compares a pair's probe with the reader's own computation."""

    def expect(self, writer: Contract, terms: HandoffTerms) -> None:
        """Called before room is given. Raises BadRequest where this isn't the probe that the pair owes."""

    async def judge(
        self, writer: Contract, terms: HandoffTerms, blocks: Sequence[BlockId], first_token_id: int
    ) -> CanaryOutcome:
        """One decode step from `blocks`, which the judge owns from here and frees on every path.

        Raises:
            KvpactError: the reader's own engine failed.
        """


class TakenOnTrust:
    """Checks nothing and probes nothing: for laboratory runs that look at damage themselves."""

    def verify(self, landed: Landed, witnesses: Sequence[Witness]) -> WitnessReport:
        """See Verifier."""
        return WitnessReport()
