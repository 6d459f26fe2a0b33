"""The objects that clients read: completions and chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.text_generation import TextPart
from kvpact.types import FinishReason

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One finished or growing answer."""

    prompt: tuple[int, ...]
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, part: TextPart) -> None:
        """Adds a part."""
        self.texts.append(part.text)
        self.token_ids.extend(part.token_ids)
        self.finish_reason = part.finish_reason
        self.stop_reason = part.stop_reason


def usage_of(choices: Sequence[Choice]) -> Json:
    """Token counts of all choices together."""
    prompt = sum(len(choice.prompt) for choice in choices)
    output = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


class Shape(Protocol):
    """How one route shows choices."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer without streaming."""

    def opening(self, index: int) -> Json | None:
        """What a choice's stream begins with, if anything."""

    def chunk(self, index: int, part: TextPart) -> Json:
        """One part of a choice's stream."""

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """The last object of a stream that was asked for usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    created: int
    model: str

    def of(self, kind: str, choices: list[Json]) -> Json:
        """An object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """See Shape; POST /v1/completions."""

    head: Head
    with_token_ids: bool

    def whole(self, choices: Sequence[Choice]) -> Json:
        """See Shape."""
        shown = [
            _completion_choice(index, "".join(choice.texts), choice.finish_reason, choice.stop_reason)
            | self._ids(choice.token_ids, choice.prompt)
            for index, choice in enumerate(choices)
        ]
        return self.head.of("text_completion", shown) | {"usage": usage_of(choices)}

    def opening(self, index: int) -> Json | None:
        """See Shape."""
        return None

    def chunk(self, index: int, part: TextPart) -> Json:
        """See Shape."""
        choice = _completion_choice(index, part.text, part.finish_reason, part.stop_reason)
        return self.head.of("text_completion", [choice | self._ids(part.token_ids)])

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """See Shape."""
        return self.head.of("text_completion", []) | {"usage": usage_of(choices)}

    def _ids(self, token_ids: Sequence[int], prompt: Sequence[int] | None = None) -> Json:
        return _token_ids(token_ids, prompt) if self.with_token_ids else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """See Shape; POST /v1/chat/completions."""

    head: Head
    with_token_ids: bool

    def whole(self, choices: Sequence[Choice]) -> Json:
        """See Shape."""
        shown = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts)},
                "logprobs": None,
            }
            | _ending(choice.finish_reason, choice.stop_reason)
            | (_token_ids(choice.token_ids, choice.prompt) if self.with_token_ids else {})
            for index, choice in enumerate(choices)
        ]
        return self.head.of("chat.completion", shown) | {"usage": usage_of(choices)}

    def opening(self, index: int) -> Json | None:
        """See Shape."""
        return self._chunk(index, {"role": "assistant", "content": ""}, {"finish_reason": None})

    def chunk(self, index: int, part: TextPart) -> Json:
        """See Shape."""
        ids = _token_ids(part.token_ids, None) if self.with_token_ids else {}
        delta = {"content": part.text} if part.text else {}
        return self._chunk(index, delta, _ending(part.finish_reason, part.stop_reason) | ids)

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """See Shape."""
        return self.head.of("chat.completion.chunk", []) | {"usage": usage_of(choices)}

    def _chunk(self, index: int, delta: Json, more: Json) -> Json:
        return self.head.of(
            "chat.completion.chunk", [{"index": index, "delta": delta, "logprobs": None} | more]
        )


def _completion_choice(
    index: int, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None
) -> Json:
    return {"index": index, "text": text, "logprobs": None} | _ending(finish_reason, stop_reason)


def _ending(finish_reason: FinishReason | None, stop_reason: str | int | None) -> Json:
    return {"finish_reason": finish_reason.value if finish_reason else None, "stop_reason": stop_reason}


def _token_ids(token_ids: Sequence[int], prompt: Sequence[int] | None) -> Json:
    return {"token_ids": list(token_ids)} | ({"prompt_token_ids": list(prompt)} if prompt is not None else {})
