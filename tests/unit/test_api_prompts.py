"""Long bodies don't hold the event loop up."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.prompts import INLINE_CHARACTERS, chat_job
from coordinator.api.requests import ChatBody
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
    await chat_job(ChatBody.model_validate(body), model, ApiConfig(), "r")
    assert (model.thread == threading.get_ident()) is inline


async def test_a_long_chat_that_cannot_be_rendered_is_refused_all_the_same(model: WatchedText) -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "image_url"}]
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(BadRequest, match="image_url"):
        await chat_job(body, model, ApiConfig(), "r")
