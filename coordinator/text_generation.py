"""One prompt to text: tokens from the workers, characters and stop strings on the way to the user."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from coordinator.accounting import Account
from coordinator.attempt import GenerationRequest
from coordinator.detokenize import Detokenizer
from coordinator.lifecycle import Lifecycle
from coordinator.stop_strings import StopStrings
from kvpact.handoff.jobs import DecodedTokens
from kvpact.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Text and the tokens behind it. The last part has a finish reason.

    `stop_reason` is the stop string or the stop token that the user named.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the text of one generation is made."""

    detokenizer: Detokenizer
    stops: StopStrings
    named_stop_tokens: frozenset[int]
    """Stop tokens that the user named, as opposed to the model's own."""
    include_stop: bool


async def generate_text(
    lifecycle: Lifecycle, request: GenerationRequest, rules: TextRules, account: Account
) -> AsyncGenerator[TextPart, None]:
    """Yields parts to a finish reason; leaving it early cancels. Raises what Lifecycle.run raises."""
    with account:
        async with contextlib.aclosing(lifecycle.run(request, account.commit)) as produced:
            async for tokens in produced:
                account.take(len(tokens.token_ids))
                part = _part(tokens, rules)
                if part.finish_reason is not None:
                    account.finish(part.finish_reason)
                yield part
                if part.finish_reason is not None and tokens.finish_reason is None:
                    return


def _part(tokens: DecodedTokens, rules: TextRules) -> TextPart:
    """The part that these tokens make; a stop string found in it ends the text."""
    ended_by_token = tokens.finish_reason is FinishReason.STOP and bool(tokens.token_ids)
    hides_last = ended_by_token and not rules.include_stop
    text = rules.detokenizer.push(tokens.token_ids[:-1] if hides_last else tokens.token_ids)
    if tokens.finish_reason is not None:
        text += rules.detokenizer.flush()
    passed = rules.stops.push(text)
    if passed.stopped_by is not None:
        return TextPart(
            text=passed.text,
            token_ids=tokens.token_ids,
            finish_reason=FinishReason.STOP,
            stop_reason=passed.stopped_by,
        )
    if tokens.finish_reason is None:
        return TextPart(text=passed.text, token_ids=tokens.token_ids)
    last = tokens.token_ids[-1] if ended_by_token else None
    return TextPart(
        text=passed.text + rules.stops.flush(),
        token_ids=tokens.token_ids,
        finish_reason=tokens.finish_reason,
        stop_reason=last if last in rules.named_stop_tokens else None,
    )
