"""POST /v1/chat/completions as OpenAI's own client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from tokenizers import Tokenizer

from tests.coordinator_fakes import FakeCluster, fake_cluster, make_text_folder

HELLO: Any = [{"role": "user", "content": "hi"}]
TEXT = "()*+,-./0123456789"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(make_text_folder(tmp_path), default_chat_max_tokens=7) as running:
        yield running


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_text(cluster: FakeCluster, folder: Path) -> str:
    """What the last prompt says, special tokens included."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = list(cluster.prefill.requests[-1].token_ids)
    return str(tokenizer.decode(ids, skip_special_tokens=False))


async def test_a_chat_has_a_message_reason_and_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=4)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        TEXT[:4],
        "length",
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


async def test_the_prompt_is_the_rendered_template_without_further_special_tokens(
    cluster: FakeCluster, client: AsyncOpenAI, tmp_path: Path
) -> None:
    await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    assert prompt_text(cluster, tmp_path) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_text_parts_are_joined(cluster: FakeCluster, client: AsyncOpenAI, tmp_path: Path) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    await client.chat.completions.create(model="fake", messages=parts, max_tokens=1)
    assert "user\na\nb<" in prompt_text(cluster, tmp_path)


async def test_a_picture_is_refused_by_name(client: AsyncOpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(BadRequestError, match="image_url"):
        await client.chat.completions.create(model="fake", messages=parts)


async def test_a_stream_begins_with_the_role_and_ends_with_reason_and_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    first, *middle, last = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.choices[0].finish_reason is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == TEXT[:3]
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None, None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    assert {chunk.object for chunk in (first, *middle, last)} == {"chat.completion.chunk"}


async def test_usage_can_come_with_every_chunk(client: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=3, stream=True, stream_options=options
    )
    usages = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert usages == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, 7),
        ({"max_tokens": 1}, 1),
        ({"max_completion_tokens": 1}, 1),
        ({"max_completion_tokens": 2}, 2),
        ({"max_completion_tokens": 3, "max_tokens": 3}, 3),
    ],
)
async def test_both_names_of_the_token_limit_work(
    client: AsyncOpenAI, asked: dict[str, int], tokens: int
) -> None:
    answer = await client.chat.completions.create(model="fake", messages=HELLO, **asked)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == TEXT[:tokens]


async def test_a_stop_string_that_splits_over_the_seam_ends_the_chat(
    cluster: FakeCluster, client: AsyncOpenAI
) -> None:
    cluster.script.say("END and more")
    answer = await client.chat.completions.create(model="fake", messages=HELLO, stop=["END"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")


async def test_what_changes_nothing_is_accepted(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=2,
        temperature=0,
        top_p=1,
        n=1,
        seed=7,
        user="me",
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        logit_bias={},
        tool_choice="none",
        response_format={"type": "text"},
        extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "no_such_field": {"a": 1}},
    )
    assert answer.choices[0].message.content == TEXT[:2]


async def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    own = make_text_folder(tmp_path, template="{{ messages[0].content }}{{ mode }}")
    async with (
        fake_cluster(own) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        await client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=1, extra_body={"chat_template_kwargs": {"mode": "!"}}
        )
        assert prompt_text(cluster, tmp_path) == "hi!"
