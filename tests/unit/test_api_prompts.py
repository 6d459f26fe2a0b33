"""Long bodies don't hold the event loop up."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import field_validator
from starlette.requests import Request

from coordinator.api.bodies import INLINE_BYTES, parse_body, read_body
from coordinator.api.prompts import INLINE_CHARACTERS, chat_job, completion_jobs
from coordinator.api.requests import ChatBody, CompletionBody
from coordinator.model_folder import ModelText
from kvpact.config import ApiConfig
from kvpact.errors import BadRequest
from tests.coordinator_fakes import make_text_folder

LONG = "x" * (INLINE_CHARACTERS + 1)


class WatchedText(ModelText):
    """Notes the thread in which a template is rendered."""

    thread: int | None = None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        self.thread = threading.get_ident()
        return super().render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)


@pytest.fixture
def model(tmp_path: Path) -> WatchedText:
    return WatchedText(make_text_folder(tmp_path, context=1 << 20))


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, True),
        ({"messages": [{"role": "user", "content": LONG}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, False),
        ({"messages": [{"role": "user", "content": "hi", "name": LONG}]}, False),
        ({"messages": [{"role": "user", "content": "hi"}] * (INLINE_CHARACTERS // 4)}, False),
        (
            {
                "messages": [{"role": "user", "content": "hi"}],
                "chat_template_kwargs": {"a": [{"b": LONG}]},
            },
            False,
        ),
    ],
)
async def test_a_long_chat_is_rendered_off_the_event_loop(
    model: WatchedText, body: dict[str, Any], inline: bool
) -> None:
    await chat_job(ChatBody.model_validate(body), model, ApiConfig(), "r", context_tokens=model.context)
    assert (model.thread == threading.get_ident()) is inline


async def test_a_long_chat_that_cannot_be_rendered_is_refused_all_the_same(model: WatchedText) -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "image_url"}]
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(BadRequest, match="image_url"):
        await chat_job(body, model, ApiConfig(), "r", context_tokens=model.context)


async def test_a_text_that_no_context_can_hold_is_not_tokenised(
    model: WatchedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "encode", None)
    text = "x" * 10_000
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": text}]})
    with pytest.raises(BadRequest, match="context length is 64 tokens"):
        await chat_job(chat, model, ApiConfig(), "r", context_tokens=64)
    with pytest.raises(BadRequest, match="context length is 64 tokens") as refusal:
        await completion_jobs(CompletionBody(prompt=text), model, ApiConfig(), "r", context_tokens=64)
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("[" + "5," * 4096 + '"no id"]', "4097 tokens"),
        ("[[5]," + "5," * 64 + "5]", "66 prompts"),
        ("[[5],[" + "5," * 4096 + '"no id"]]', "4097 tokens"),
        ('["a",' + "5," * 64 + "5]", "66 prompts"),
    ],
)
def test_lists_are_measured_before_anything_looks_at_their_entries(prompt: str, found: str) -> None:
    with pytest.raises(BadRequest, match=found):
        parse_body(b'{"prompt": %s}' % prompt.encode(), CompletionBody, 4096)


def test_of_many_wrong_entries_only_the_first_is_looked_at() -> None:
    for field in ("stop_token_ids", "tools", "modalities"):
        body = {"messages": [{"role": "user", "content": "x"}], field: [None] * 1000}
        with pytest.raises(RequestValidationError) as refusal:
            parse_body(json.dumps(body).encode(), ChatBody, 4096)
        assert len(refusal.value.errors()) == 1


@pytest.mark.parametrize(("spaces", "inline"), [(0, True), (INLINE_BYTES, False)])
async def test_a_large_body_is_parsed_off_the_event_loop(spaces: int, inline: bool) -> None:
    threads: list[int] = []

    class Watched(CompletionBody):
        @field_validator("prompt")
        @classmethod
        def _note(cls, prompt: Any) -> Any:
            threads.append(threading.get_ident())
            return prompt

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "x"}' + b" " * spaces}

    headers = [(b"content-type", b"application/json; charset=utf-8")]
    await read_body(Request({"type": "http", "headers": headers}, receive), Watched, 4096)
    assert (threads == [threading.get_ident()]) is inline
