"""What a prefill worker is asked for and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.handoff.messages import CommitReceipt
from kvpact.types import FinishReason, HandoffId, Sampling, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """The decode worker that a cache goes to."""

    life: WorkerLife
    endpoint: str
    """host:port on which it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One prompt. `decode` None: one token is asked and nothing is handed over."""

    handoff_id: HandoffId
    prefill: WorkerLife
    """Process life that is meant."""
    decode: Partner | None
    token_ids: tuple[int, ...]
    """Prompt tokens, and on a resume the output tokens that the user already has."""
    original_prompt_tokens: int
    table_length: int
    sampling: Sampling
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The decode worker set blocks aside."""

    held_prefix_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The decode worker owns the cache."""

    receipt: CommitReceipt
    payload_bytes: int
    handoff_s: float
    """From the first chunk sent to the acknowledged commit."""
    exposed_s: float
    """The part of it after the prompt was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """First output token; with a handoff it comes after Committed."""

    token_id: int
    finish_reason: FinishReason | None


PrefillEvent = Reserved | Committed | FirstToken
