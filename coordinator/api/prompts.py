"""From a checked body to generation requests: prompts as tokens, limits, sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from coordinator.api.lengths import check_prompt_count, context_exceeded, tokens_and_more
from coordinator.api.requests import ChatBody, CompletionBody, GenerationBody, Message
from coordinator.attempt import GenerationRequest
from coordinator.model_folder import ModelText
from coordinator.stop_strings import StopStrings
from coordinator.text_generation import TextRules
from kvpact.config import ApiConfig
from kvpact.errors import BadRequest
from kvpact.types import Sampling

INLINE_CHARACTERS = 16_384
"""Longer texts are rendered and tokenised off the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt with what turns its tokens into text."""

    request: GenerationRequest
    rules: TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """How long prompt and output of one request may be, in tokens."""

    context: int
    asked: int | None
    """Output tokens that the client asked for; None: `default`, or what the context leaves."""
    default: int
    param: str
    """Field in which the client asked."""

    def output_of(self, prompt: Sequence[int]) -> int:
        """Output tokens after a prompt. Raises BadRequest where the context has no room for those asked."""
        left = self.context - len(prompt)
        if self.asked is not None and self.asked > left:
            raise BadRequest(
                f"this model's maximum context length is {self.context} tokens, but {self.param} is "
                f"{self.asked} and the prompt has {len(prompt)} tokens; set {self.param} to at most {left} "
                "or leave it out",
                param=self.param,
                code="context_length_exceeded",
            )
        return min(self.asked or self.default, left)


async def completion_jobs(
    body: CompletionBody, model: ModelText, api: ApiConfig, request_id: str, *, context_tokens: int
) -> list[Job]:
    """One job per prompt; `context_tokens` are what the workers serve. Raises BadRequest."""
    prompts = _prompt_list(body.prompt)
    check_prompt_count(len(prompts))
    limits = _Limits(
        context=context_tokens, asked=body.max_tokens, default=api.default_max_tokens, param="max_tokens"
    )
    add_special = body.add_special_tokens is not False
    encoded = [
        await _tokens(prompt, model, context_tokens, "prompt", add_special_tokens=add_special)
        for prompt in prompts
    ]
    return [
        _job(body, model, prompt, limits, f"{request_id}-{index}" if index else request_id, "/v1/completions")
        for index, prompt in enumerate(encoded)
    ]


async def chat_job(
    body: ChatBody, model: ModelText, api: ApiConfig, request_id: str, *, context_tokens: int
) -> Job:
    """The job of one chat; `context_tokens` are what the workers serve. Raises BadRequest."""
    given = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(given) > 1:
        raise BadRequest(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens is {body.max_tokens}; "
            "they mean the same, give one of them",
            param="max_completion_tokens",
        )
    if _is_long([body.messages, body.chat_template_kwargs]):
        text = await asyncio.to_thread(_render, body, model)
    else:
        text = _render(body, model)
    prompt = await _tokens(
        text, model, context_tokens, "messages", add_special_tokens=bool(body.add_special_tokens)
    )
    limits = _Limits(
        context=context_tokens,
        asked=body.max_completion_tokens or body.max_tokens,
        default=api.default_chat_max_tokens,
        param="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
    )
    return _job(body, model, prompt, limits, request_id, "/v1/chat/completions")


def _render(body: ChatBody, model: ModelText) -> str:
    return model.render_chat(
        [_plain_message(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs or {},
    )


def _is_long(value: Any) -> bool:
    """Whether a value holds more than INLINE_CHARACTERS; what is no text counts as one. Looks no further."""
    left, pending = INLINE_CHARACTERS, [value]
    while pending and left >= 0:
        found = pending.pop()
        left -= len(found) if isinstance(found, str) else 1
        if isinstance(found, BaseModel):
            pending.extend(inner for _, inner in found)
        elif isinstance(found, dict):
            pending.extend([*found, *found.values()])
        elif isinstance(found, list):
            pending.extend(found)
    return left < 0


def _job(
    body: GenerationBody,
    model: ModelText,
    prompt: tuple[int, ...],
    limits: _Limits,
    request_id: str,
    endpoint: str,
) -> Job:
    _check_prompt(prompt, model, limits.context, "messages" if isinstance(body, ChatBody) else "prompt")
    output = limits.output_of(prompt)
    named = _named_stop_tokens(body, model)
    return Job(
        request=GenerationRequest(
            request_id=request_id,
            endpoint=endpoint,
            prompt=prompt,
            table_length=len(prompt) + output,
            # The model's own end tokens are the workers' to know; ignore_eos tells whether they end the text.
            sampling=Sampling(
                max_output_tokens=output,
                stop_token_ids=named,
                ignore_eos=bool(body.ignore_eos),
            ),
        ),
        rules=TextRules(
            detokenizer=model.detokenizer(prompt, skip_special=body.skip_special_tokens is not False),
            stops=StopStrings(body.stop_strings(), include=bool(body.include_stop_str_in_output)),
            named_stop_tokens=named,
            include_stop=bool(body.include_stop_str_in_output),
        ),
    )


def _prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt is empty; give at least one token", param="prompt")
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    return [token_ids] if token_ids else [entry for entry in prompt if isinstance(entry, str | list)]


async def _tokens(
    prompt: str | list[int], model: ModelText, context_tokens: int, param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if not prompt:
        return ()
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text isn't valid Unicode: {error.reason} at {error.start}", param=param
        ) from error
    if len(prompt) > context_tokens * model.characters_per_token:
        found = f"{len(prompt)} characters, of which a token stands for {model.characters_per_token} at most"
        raise context_exceeded(found, context_tokens, param)
    if len(prompt) <= INLINE_CHARACTERS:
        return model.encode(prompt, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(model.encode, prompt, add_special_tokens=add_special_tokens)


def _check_prompt(prompt: Sequence[int], model: ModelText, context_tokens: int, param: str) -> None:
    if not prompt:
        raise BadRequest(f"{param} is empty; give at least one token", param=param)
    if len(prompt) >= context_tokens:
        raise context_exceeded(tokens_and_more(len(prompt)), context_tokens, param)
    _check_ids(prompt, model, param)


def _check_ids(token_ids: Sequence[int], model: ModelText, param: str) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocabulary:
            raise BadRequest(
                f"{param}[{index}] is token id {token_id}, expected one from 0 to {model.vocabulary - 1}",
                param=param,
            )


def _named_stop_tokens(body: GenerationBody, model: ModelText) -> frozenset[int]:
    _check_ids(body.stop_token_ids or (), model, "stop_token_ids")
    return frozenset(body.stop_token_ids or ())


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as templates want it: content is text."""
    plain = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        texts = [part.text for part in message.content if part.type == "text"]
        if len(texts) != len(message.content) or None in texts:
            kinds = (
                ", ".join(sorted({part.type for part in message.content} - {"text"})) or "text without text"
            )
            raise BadRequest(
                f"a message holds a part of type {kinds}; only text is supported",
                param="messages",
                code="unsupported_value",
            )
        plain["content"] = "\n".join(text for text in texts if text is not None)
    return plain
