"""What a coordinator asks of workers and what they answer, as frozen values like the protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.handoff.messages import CanaryOutcome
from kvpact.handoff.transport_choice import TransportChoice
from kvpact.types import Exactness, FinishReason, HandoffId, Sampling, Verdict, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """The decode worker that a cache goes to."""

    life: WorkerLife
    endpoint: str
    """host:port on which it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """What two workers agreed on, a refusal included."""

    verdict: Verdict
    canary: CanaryOutcome | None = None
    """None: no probe ran."""
    transport: TransportChoice | None = None
    """How payloads travel; None where the verdict is a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One prompt to compute. `decode` None: one token is asked and nothing is handed over."""

    handoff_id: HandoffId
    prefill: WorkerLife
    """Process life that is meant."""
    decode: Partner | None
    token_ids: tuple[int, ...]
    """Prompt tokens, and on a resume the output tokens that the user already has."""
    original_prompt_tokens: int
    """Output tokens are counted from there."""
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

    payload_bytes: int
    exactness: Exactness
    handoff_s: float
    """From the first chunk sent to the acknowledged commit."""
    exposed_s: float
    """The part of it after the prompt was computed."""
    max_abs_error: float | None = None
    """Measured error of a lossy plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """First output token; with a handoff it comes after Committed."""

    token_id: int
    finish_reason: FinishReason | None


PrefillEvent = Reserved | Committed | FirstToken


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Order to decode a committed handoff."""

    handoff_id: HandoffId
    decode: WorkerLife
    """Process life that is meant."""
    token_ids: tuple[int, ...]
    """Prompt tokens and output tokens so far, the first output token included."""
    sampling: Sampling
    original_prompt_tokens: int
    """Output tokens are counted from there."""
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """One prompt for a decode worker alone: it computes and decodes, and nothing is handed over."""

    decode: WorkerLife
    """Process life that is meant."""
    token_ids: tuple[int, ...]
    """Prompt tokens, and on a resume the output tokens that the user already has."""
    original_prompt_tokens: int
    """Output tokens are counted from there."""
    table_length: int
    sampling: Sampling
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTokens:
    """One or more output tokens in order; the sequence goes on while finish_reason is None."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
