"""Bodies of the two generation routes: fields, their types, and what is refused as it can't be honoured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvpact.errors import BadRequest

MAX_STOPS = 4
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
GREEDY_ONLY = "kvpact decodes greedily only: leave temperature out or set it to 0"


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """Fields that both routes know. Those of `REFUSED` are checked by `refuse_unsupported`."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, fail_fast=True)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    user: str | None = None
    n: int | None = Field(default=None, ge=1)
    best_of: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    min_tokens: int | None = Field(default=None, ge=0)
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops_are_few_and_not_empty(cls, stop: Any) -> Any:
        stops = stop if isinstance(stop, list) else [stop]
        if len(stops) > MAX_STOPS:
            raise ValueError(f"has {len(stops)} strings, at most {MAX_STOPS} are possible")
        if "" in stops:
            raise ValueError("holds an empty string, which would end every text at once")
        return stop

    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings in the order given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_has_one_of_four_forms(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (isinstance(prompt, list) and _uniform(prompt)):
            return prompt
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        )


class ContentPart(_Body):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(_Body):
    """One message of a chat. Fields beyond these reach the template as they are."""

    role: str
    content: str | list[ContentPart] | None = None

    @field_validator("role")
    @classmethod
    def _role_is_known(cls, role: str) -> str:
        if role not in ROLES:
            raise ValueError(f"a role is one of {', '.join(ROLES)}")
        return role


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = Field(default=None, fail_fast=True)
    audio: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Harmless = Callable[[Any], bool]
"""Whether a given value changes nothing, so that it may be ignored."""


def _is(*values: Any) -> Harmless:
    return lambda value: any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
    )


def _is_empty(value: Any) -> bool:
    return not value and value is not False and value != 0


REFUSED: dict[str, tuple[Harmless, str]] = {
    "temperature": (_is(0), GREEDY_ONLY),
    "top_p": (_is(1), GREEDY_ONLY),
    "top_k": (_is(-1, 0, 1), GREEDY_ONLY),
    "min_p": (_is(0), GREEDY_ONLY),
    "n": (_is(1), "one choice per prompt is served"),
    "best_of": (_is(1), "one choice per prompt is served"),
    "presence_penalty": (_is(0), "penalties are not supported"),
    "frequency_penalty": (_is(0), "penalties are not supported"),
    "repetition_penalty": (_is(1), "penalties are not supported"),
    "min_tokens": (_is(0), "a minimum length is not supported; ignore_eos is"),
    "logit_bias": (_is_empty, "biases are not supported"),
    "bad_words": (_is_empty, "banned words are not supported"),
    "allowed_token_ids": (lambda value: False, "restricting tokens is not supported"),
    "logprobs": (_is(False), "log probabilities are not supported"),
    "top_logprobs": (_is(0), "log probabilities are not supported"),
    "prompt_logprobs": (lambda value: False, "log probabilities are not supported"),
    "echo": (_is(False), "repeating the prompt is not supported"),
    "suffix": (_is_empty, "text after the completion is not supported"),
    "prompt_embeds": (lambda value: False, "prompts are text or token ids"),
    "response_format": (lambda value: value.get("type") == "text", 'only {"type": "text"} is supported'),
    "structured_outputs": (_is_empty, "guided output is not supported"),
    "guided_json": (lambda value: False, "guided output is not supported"),
    "guided_regex": (lambda value: False, "guided output is not supported"),
    "guided_choice": (lambda value: False, "guided output is not supported"),
    "guided_grammar": (lambda value: False, "guided output is not supported"),
    "use_beam_search": (_is(False), "beam search is not supported"),
    "length_penalty": (_is(1), "beam search is not supported"),
    "spaces_between_special_tokens": (_is(True), "how special tokens are spaced can't be chosen"),
    "truncate_prompt_tokens": (lambda value: False, "a prompt is never shortened; send a shorter one"),
    "thinking_token_budget": (lambda value: False, "a budget for reasoning is not supported"),
    "reasoning_effort": (_is("none"), "an effort for reasoning is not supported; see chat_template_kwargs"),
    "verbosity": (_is("medium"), "a wish for length is not supported; see max_completion_tokens"),
    "logits_processors": (_is_empty, "processors of logits are not supported"),
    "return_tokens_as_token_ids": (_is(False), "token ids come with return_token_ids"),
    "documents": (_is_empty, "documents are not supported; write them into a message"),
    "web_search_options": (lambda value: False, "tools are not supported"),
    "mm_processor_kwargs": (_is_empty, "the only modality is text"),
    "tools": (_is_empty, "tools are not supported"),
    "tool_choice": (_is("none", "auto"), "tools are not supported"),
    "functions": (_is_empty, "tools are not supported"),
    "function_call": (_is("none", "auto"), "tools are not supported"),
    "modalities": (lambda value: value in ([], ["text"]), "the only modality is text"),
    "audio": (_is_empty, "the only modality is text"),
    "chat_template": (lambda value: False, "the model's own chat template is used"),
    "continue_final_message": (_is(False), "going on with a message is not supported"),
}
"""Fields that would change the result and can't be honoured: which values may pass, and why others not."""


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises BadRequest that names the first field which asks for what isn't there."""
    given = body.model_dump(include=set(REFUSED), exclude_none=True) | {
        name: value for name, value in (body.model_extra or {}).items() if value is not None
    }
    for name, value in given.items():
        harmless, why = REFUSED.get(name, (_anything, ""))
        if not harmless(value):
            raise BadRequest(
                f"{name}={_short(value)} is not supported: {why}", param=name, code="unsupported_value"
            )
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is only possible with stream=true", param="stream_options")


def unknown_fields(body: GenerationBody) -> list[str]:
    """Names of fields that nothing here knows; they are ignored."""
    return sorted(set(body.model_extra or {}) - set(REFUSED) - IGNORED)


IGNORED = frozenset(
    {"store", "metadata", "service_tier", "parallel_tool_calls", "priority", "request_id", "session_id"}
    | {"cache_salt", "kv_transfer_params", "safety_identifier", "prompt_cache_key", "prediction"}
)
"""Known fields that change nothing here."""


def _anything(value: Any) -> Literal[True]:
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _uniform(prompt: list[Any]) -> bool:
    """Whether all entries are strings, or token ids, or lists of token ids. Emptiness is judged later."""
    if all(isinstance(entry, str) for entry in prompt) or all(_is_id(entry) for entry in prompt):
        return True
    return all(isinstance(entry, list) and all(_is_id(token) for token in entry) for entry in prompt)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
