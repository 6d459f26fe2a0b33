"""How long lists of a body may be: judged before anything looks at their entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.errors import BadRequest

MAX_PROMPTS = 64
MAX_STOP_TOKENS = 1024


def check_lengths(fields: Mapping[str, Any], context_tokens: int) -> None:
    """Takes a body of unknown form. Raises BadRequest where a list of it can't fit the context."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt:
        _check_prompt_lists(prompt, context_tokens)
    stops = fields.get("stop_token_ids")
    if isinstance(stops, list) and len(stops) > MAX_STOP_TOKENS:
        raise BadRequest(
            f"stop_token_ids holds {len(stops)} token ids; at most {MAX_STOP_TOKENS} are possible",
            param="stop_token_ids",
        )
    messages = fields.get("messages")
    if isinstance(messages, list):
        _check_messages(messages, context_tokens)


def check_prompt_count(count: int) -> None:
    """Raises BadRequest for too many prompts in one request."""
    if count > MAX_PROMPTS:
        raise BadRequest(
            f"{count} prompts in one request; at most {MAX_PROMPTS} are possible", param="prompt"
        )


def context_exceeded(found: str, context_tokens: int, param: str) -> BadRequest:
    """The refusal of a prompt; `found` says its length."""
    return BadRequest(
        f"this model's maximum context length is {context_tokens} tokens, but the prompt has {found}; "
        "shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def tokens_and_more(count: int) -> str:
    """Length of a prompt that leaves no room."""
    return f"{count} tokens and at least one more is generated"


def _check_prompt_lists(prompt: list[Any], context_tokens: int) -> None:
    if isinstance(prompt[0], str | list):
        check_prompt_count(len(prompt))
        longest = max((len(entry) for entry in prompt if isinstance(entry, list)), default=0)
    else:
        longest = len(prompt)
    if longest >= context_tokens:
        raise context_exceeded(tokens_and_more(longest), context_tokens, "prompt")


def _check_messages(messages: list[Any], context_tokens: int) -> None:
    """A message or a part of one costs a token at least."""
    pieces = len(messages)
    if pieces < context_tokens:
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        pieces += sum(len(content) for content in contents if isinstance(content, list))
    if pieces > context_tokens:
        raise context_exceeded(f"{pieces} messages and parts of messages", context_tokens, "messages")
