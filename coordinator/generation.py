"""A whole answer to one prompt, for callers in this process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from coordinator.accounting import Account
from coordinator.attempt import GenerationRequest
from coordinator.lifecycle import Lifecycle
from coordinator.text_generation import TextRules, generate_text
from kvpact.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, and what the handoff cost. Handoff facts are None where nothing was handed over."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ttft_s: float
    """Seconds from the request to its first token."""
    handoff_bytes: int | None
    handoff_s: float | None
    """Seconds from the first chunk sent to the acknowledged commit."""
    max_abs_error: float | None
    """Largest error of a lossy conversion; None where nothing was lost."""


async def collect_answer(
    lifecycle: Lifecycle, request: GenerationRequest, rules: TextRules, account: Account
) -> Answer:
    """Runs one prompt to its end. Raises what Lifecycle.run raises."""
    texts: list[str] = []
    token_ids: list[int] = []
    finish_reason = FinishReason.CANCELLED
    async with contextlib.aclosing(generate_text(lifecycle, request, rules, account)) as parts:
        async for part in parts:
            texts.append(part.text)
            token_ids.extend(part.token_ids)
            finish_reason = part.finish_reason or finish_reason
    committed = account.committed
    return Answer(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        ttft_s=account.ttft_s,
        handoff_bytes=committed.payload_bytes if committed else None,
        handoff_s=committed.handoff_s if committed else None,
        max_abs_error=committed.max_abs_error if committed else None,
    )
