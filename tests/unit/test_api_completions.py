"""POST /v1/completions as OpenAI's own client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from kvpact.types import VerdictWord
from tests.coordinator_fakes import EOS, FakeCluster, fake_cluster, make_text_folder, make_verdict

TEXT = "()*+,-./0123456789"
"""What the fake workers answer: tokens 10, 11, ... are these bytes."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(make_text_folder(tmp_path)) as running:
        yield running


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_a_completion_has_text_reason_and_usage(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="hello", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:5], "length")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 5, 10)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_a_stream_gives_the_same_text_and_usage_last(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="fake", prompt="hello", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT[:5]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_a_stream_without_options_carries_no_usage(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model="fake", prompt="hello", max_tokens=2, stream=True)
    assert [chunk.usage async for chunk in stream] == [None, None]


async def test_the_blocking_client_works_too(cluster: FakeCluster) -> None:
    import asyncio

    def ask() -> str:
        with OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            return client.completions.create(model="fake", prompt="hello", max_tokens=3).choices[0].text

    assert await asyncio.to_thread(ask) == TEXT[:3]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [({"max_tokens": 1}, 1), ({"max_tokens": 2}, 2), ({}, 16), ({"max_tokens": None}, 16)],
)
async def test_max_tokens_counts_all_output_tokens_and_has_a_default(
    client: AsyncOpenAI, asked: dict[str, int], tokens: int
) -> None:
    answer = await client.completions.create(model="fake", prompt="hello", **asked)  # type: ignore[call-overload]
    assert answer.choices[0].text == TEXT[:tokens]
    assert answer.choices[0].finish_reason == "length"


async def test_one_token_moves_no_cache(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    await client.completions.create(model="fake", prompt="hello", max_tokens=1)
    assert cluster.decode.requests == []


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["!", "!!"], [[3], [3, 3]]),
    ],
)
async def test_prompts_have_four_forms(
    cluster: FakeCluster, client: AsyncOpenAI, prompt: list[int], sent: list[list[int]]
) -> None:
    answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(len(sent)))
    assert all(choice.text == TEXT[:2] for choice in answer.choices)
    assert sorted(list(request.token_ids) for request in cluster.prefill.requests) == sorted(sent)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(sent)


async def test_several_prompts_stream_together_by_index(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model="fake", prompt=["a", "b", "c"], max_tokens=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT[:3]] * 3


async def test_an_end_token_is_counted_and_not_shown(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    cluster.script.say("ab")
    answer = await client.completions.create(model="fake", prompt="x", max_tokens=9)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_ignore_eos_goes_on(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    cluster.script.reply = [10, EOS, 11, 12]
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("()*", "length")


async def test_ignore_eos_holds_beside_named_stop_tokens(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    cluster.script.reply = [10, EOS, 11, 12, EOS, 13, 14]
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=7, extra_body={"ignore_eos": True, "stop_token_ids": [13]}
    )
    assert answer.usage is not None
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("()*", 6)


async def test_named_stop_tokens_take_nothing_from_the_models_own(
    cluster: FakeCluster, client: AsyncOpenAI
) -> None:
    cluster.script.reply = [10, EOS, 11, 12]
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=4, extra_body={"stop_token_ids": [13]}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("(", "stop")


async def test_a_named_stop_token_ends_the_text_even_with_ignore_eos(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=9, extra_body={"ignore_eos": True, "stop_token_ids": [13]}
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT[:3], "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == 13


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", "two", "one "),
        ("one two three", ["zzz", " t"], "one"),
        ("aab", "ab", "a"),
        ("abc", ["abc", "b"], "a"),
        ("stop", "s", ""),
        ("🙂🙃!", "🙃", "🙂"),
        ("no such", "nothing", "no such"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_wherever_tokens_split_them(
    cluster: FakeCluster, client: AsyncOpenAI, text: str, stop: str | list[str], shown: str, stream: bool
) -> None:
    cluster.script.say(text)
    assert await _text(client, stream=stream, stop=stop) == (shown, "stop")


async def _text(client: AsyncOpenAI, *, stream: bool, stop: str | list[str]) -> tuple[str, str | None]:
    if not stream:
        answer = await client.completions.create(model="fake", prompt="x", max_tokens=50, stop=stop)
        return answer.choices[0].text, answer.choices[0].finish_reason
    chunks = [
        chunk.choices[0]
        async for chunk in await client.completions.create(
            model="fake", prompt="x", max_tokens=50, stop=stop, stream=True
        )
    ]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


async def test_a_stop_string_ends_the_work_on_both_workers(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    cluster.script.say("one two three four five six")
    cluster.decode.hold_after = 8
    await client.completions.create(model="fake", prompt="x", max_tokens=27, stop="two")
    await cluster.decode.cancelled.wait()
    await cluster.decode.released_now.wait()
    await cluster.prefill.released_now.wait()


async def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end(
    cluster: FakeCluster, client: AsyncOpenAI
) -> None:
    cluster.script.say("wait for sto")
    answer = await client.completions.create(model="fake", prompt="x", max_tokens=50, stop="stop")
    assert answer.choices[0].text == "wait for sto"


async def test_the_stop_string_is_kept_where_asked(cluster: FakeCluster, client: AsyncOpenAI) -> None:
    cluster.script.say("one two")
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=50, stop="ne", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "one"


@pytest.mark.parametrize("text", ["🙂", "x🙂y", "안녕하세요 🙂", "e\u0301"])
async def test_characters_split_over_tokens_arrive_whole(
    cluster: FakeCluster, client: AsyncOpenAI, text: str
) -> None:
    cluster.script.say(text)
    stream = await client.completions.create(model="fake", prompt="x", max_tokens=60, stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_a_text_that_ends_inside_a_character_shows_it_once(
    cluster: FakeCluster, client: AsyncOpenAI
) -> None:
    cluster.script.say("a🙂".encode()[:-1], ends=False)
    stream = await client.completions.create(model="fake", prompt="x", max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a\ufffd"


async def test_a_lost_decode_worker_is_invisible_in_the_stream(
    cluster: FakeCluster, client: AsyncOpenAI
) -> None:
    cluster.decode.fail_after = 3
    stream = await client.completions.create(
        model="fake", prompt="x", max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT[:10]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (1, 10)


async def test_token_ids_come_along_where_asked(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt=[5, 6], max_tokens=3, extra_body={"return_token_ids": True}
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert (extra["token_ids"], extra["prompt_token_ids"]) == ([10, 11, 12], [5, 6])


async def test_a_converting_pair_serves(tmp_path: Path) -> None:
    def convert(cluster: FakeCluster) -> None:
        cluster.prefill.verdicts = lambda decode: make_verdict(VerdictWord.CONVERT, fields=["block_size"])

    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=convert) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        answer = await client.completions.create(model="fake", prompt="x", max_tokens=4)
    assert answer.choices[0].text == TEXT[:4]
