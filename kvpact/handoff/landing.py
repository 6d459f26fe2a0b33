"""How arriving bytes get into the reader's cache; the decode worker implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpact.contract.contract import Contract
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms
from kvpact.types import BlockId, Verdict


class LandingHandle(Protocol):
    """One handoff's way into the cache. Calls come one at a time, in stream order, from executor threads."""

    brief: bool
    """Whether landing a chunk is a mere copy, which the event loop may make itself."""
    max_abs_error: float | None
    """Largest absolute error that a lossy plan has made so far; None where the plan isn't lossy."""

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """Converts and writes a checked chunk; the buffers are valid during the call only."""

    def finish(self, prompt_tokens: int) -> None:
        """Everything landed: zeroes the tail of the last block behind `prompt_tokens`."""


class Landing(Protocol):
    """Makes handles. Blocks stay the receiver's until `Receiver.take`; a handle only writes into them."""

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> LandingHandle:
        """Called once per push, on an executor thread.

        `blocks` will hold the prompt in order, in the reader's block size. Those of the first `held_tokens`,
        whole blocks of both sides, hold them already and are shared: nothing may be written into them.
        """
