"""Bad input gets a clear error in OpenAI's shape, reaches no worker, and the next request works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from coordinator.api.middleware import MAX_BODY_BYTES, body_limit
from tests.coordinator_fakes import FakeCluster, fake_cluster, make_text_folder

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")
"""One cluster for all: bad input must leave no trace in it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeCluster]:
    folder = make_text_folder(tmp_path_factory.mktemp("model"), context=64)
    async with fake_cluster(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url) as client:
        yield client


async def refused(
    cluster: FakeCluster, http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 400
) -> dict[str, Any]:
    """The error of a body; checks its shape, that no worker saw it, and that the next request works."""
    cluster.prefill.requests.clear()
    answer = await http.post(path, json=body)
    error = error_of(answer, status)
    assert cluster.prefill.requests == []
    after = await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert after.status_code == 200
    return error


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, its four keys checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
async def test_an_empty_prompt(cluster: FakeCluster, http: httpx.AsyncClient, prompt: Any) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "empty" in error["message"]


@pytest.mark.parametrize("prompt", [[259], [264], [5, -1], [[5], [10**9]], [2**40]])
async def test_a_token_id_out_of_range(cluster: FakeCluster, http: httpx.AsyncClient, prompt: Any) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": prompt})
    assert "expected one from 0 to 258" in error["message"]
    assert str(prompt[-1] if isinstance(prompt[-1], int) else prompt[-1][-1]) in error["message"]


@pytest.mark.parametrize(
    "prompt", [[None], None, 7, {"a": 1}, [1.5], [True], ["a", 1], [[1], "a"], [[[1]]], [[None]]]
)
async def test_a_prompt_of_another_form(cluster: FakeCluster, http: httpx.AsyncClient, prompt: Any) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "list of token ids" in error["message"]


async def test_a_missing_prompt(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"max_tokens": 3})
    assert (error["param"], error["code"]) == ("prompt", "missing_field")


@pytest.mark.parametrize("length", [64, 65, 832])
async def test_a_prompt_longer_than_the_context_is_told_both_numbers(
    cluster: FakeCluster, http: httpx.AsyncClient, length: int
) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": "x" * length, "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"
    assert "64 tokens" in error["message"]
    assert f"{length} tokens" in error["message"]


async def test_a_prompt_that_leaves_room_for_one_token_gets_one(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post(COMPLETIONS, json={"prompt": "x" * 63})
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "prompt", "field"),
    [
        (COMPLETIONS, {"prompt": "x" * 40}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["x", "x" * 40]}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 21}]}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 21}]}, "max_completion_tokens"),
    ],
)
async def test_more_tokens_than_the_context_leaves_are_refused_with_the_numbers(
    cluster: FakeCluster, http: httpx.AsyncClient, path: str, prompt: dict[str, Any], field: str
) -> None:
    error = await refused(cluster, http, path, prompt | {field: 25})
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert f"64 tokens, but {field} is 25 and the prompt has 40 tokens" in error["message"]
    fits = await http.post(path, json=prompt | {field: 24})
    assert fits.status_code == 200


async def test_a_text_too_long_for_any_tokens_is_refused_by_its_characters(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * 833}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 833}]}),
    ):
        error = await refused(cluster, http, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "characters, of which a token stands for 13 at most" in error["message"]


async def test_more_messages_or_parts_than_tokens(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    part = {"type": "text", "text": ""}
    for messages in (HELLO * 65, [{"role": "user", "content": [part] * 64}]):
        error = await refused(cluster, http, CHAT, {"messages": messages})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "65 messages" in error["message"]


async def test_an_unknown_role_is_told_the_known_ones(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    error = await refused(cluster, http, CHAT, {"messages": [*HELLO, {"role": "robot", "content": "hi"}]})
    assert error["param"] == "messages"
    assert 'messages.1.role: found "robot"' in error["message"]
    assert "system, developer, user, assistant, tool, function" in error["message"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_known_roles_and_an_empty_message_are_served(http: httpx.AsyncClient, role: str) -> None:
    answer = await http.post(CHAT, json={"messages": [{"role": role, "content": ""}], "max_tokens": 1})
    assert answer.status_code == 200


async def test_a_chat_longer_than_the_context(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    error = await refused(cluster, http, CHAT, {"messages": [{"role": "user", "content": "x" * 100}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_an_unknown_model(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"model": "gpt-9", "prompt": "x"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"]
    assert "'fake'" in error["message"]


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_token_limit_that_is_no_positive_integer(
    cluster: FakeCluster, http: httpx.AsyncClient, name: str, value: Any
) -> None:
    error = await refused(cluster, http, CHAT, {"messages": HELLO, name: value})
    assert error["param"] == name
    assert json.dumps(value) in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 40),
        ("min_p", 0.1),
        ("n", 2),
        ("best_of", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 2),
        ("logit_bias", {"5": 1.0}),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("echo", True),
        ("suffix", "end"),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"json": {}}),
        ("guided_json", "{}"),
        ("length_penalty", 1.2),
        ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", -1),
        ("truncate_prompt_tokens", 5),
        ("return_tokens_as_token_ids", True),
        ("logits_processors", ["p"]),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    cluster: FakeCluster, http: httpx.AsyncClient, field: str, value: Any
) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": "x", field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_value")
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("thinking_token_budget", 0),
        ("documents", [{"text": "d"}]),
        ("web_search_options", {}),
        ("mm_processor_kwargs", {"a": 1}),
    ],
)
async def test_what_a_chat_cannot_honour_is_refused_by_name(
    cluster: FakeCluster, http: httpx.AsyncClient, field: str, value: Any
) -> None:
    error = await refused(cluster, http, CHAT, {"messages": HELLO, field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_value")


@pytest.mark.parametrize(
    "harmless",
    [
        {"length_penalty": 1.0, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None},
        {"reasoning_effort": "none", "verbosity": "medium", "documents": [], "logits_processors": None},
    ],
)
async def test_values_that_would_change_nothing_may_pass(
    http: httpx.AsyncClient, harmless: dict[str, Any]
) -> None:
    answer = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1} | harmless)
    assert answer.status_code == 200


async def test_two_token_limits_that_differ(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3}
    error = await refused(cluster, http, CHAT, body)
    assert error["param"] == "max_completion_tokens"
    assert "max_completion_tokens is 3 and max_tokens is 9" in error["message"]


async def test_a_temperature_above_zero_says_greedy_only(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    error = await refused(cluster, http, CHAT, {"messages": HELLO, "temperature": 1})
    assert "greedily only" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("n", 0),
        ("stream", "yes"),
        ("stop", 5),
        ("stop", ["a", None]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [264]),
        ("stop_token_ids", [5] * 1025),
        ("stop", ["a"] * 5000),
        ("seed", "x"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
    ],
)
async def test_a_value_of_the_wrong_type_or_range_is_refused_by_name(
    cluster: FakeCluster, http: httpx.AsyncClient, field: str, value: Any
) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": "x", field: value})
    assert error["param"] == field


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [None], [{}], [{"role": "user", "content": 5}], [{"role": ""}]]
)
async def test_messages_of_another_form(cluster: FakeCluster, http: httpx.AsyncClient, messages: Any) -> None:
    error = await refused(cluster, http, CHAT, {"messages": messages})
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "param", "place"),
    [
        (COMPLETIONS, r'{"prompt": "a\ud800"}', "prompt", "prompt isn't"),
        (COMPLETIONS, r'{"prompt": ["x", "\uDFFF"]}', "prompt", "prompt.1 isn't"),
        (COMPLETIONS, r'{"prompt": "x", "stop": ["\ud800"]}', "stop", "stop.0 isn't"),
        (COMPLETIONS, r'{"prompt": "x", "model": "\ud800"}', "model", "model isn't"),
        (COMPLETIONS, r'{"prompt": "x", "user": "\ud800"}', "user", "user isn't"),
        (COMPLETIONS, r'{"prompt": "x", "more": {"\ud800": 1}}', "more", "a name in more isn't"),
        (COMPLETIONS, r'{"prompt": "x", "\ud800": 1}', r"'\ud800'", "a name in the body isn't"),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages", "messages.0.content"),
        (CHAT, r'{"messages": [{"role": "\ud800", "content": "a"}]}', "messages", "messages.0.role isn't"),
        (CHAT, r'{"messages": [], "tools": [{"a": "\ud800"}]}', "tools", "tools.0.a isn't"),
    ],
)
async def test_text_that_is_no_unicode_is_named(
    http: httpx.AsyncClient, path: str, body: str, param: str, place: str
) -> None:
    answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert error["param"] == param
    assert f"{place} valid Unicode" in error["message"] or place in error["message"]


async def test_a_whole_surrogate_pair_is_text(http: httpx.AsyncClient) -> None:
    body = r'{"prompt": "\ud83d\ude00", "max_tokens": 1}'
    answer = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b'{"prompt": "x",}', b"\xff\xfe", b'{"prompt": "\xed\xa0\x80"}', b"[" * 60_000, b'{"a": NaN'],
)
async def test_malformed_json(cluster: FakeCluster, http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(answer, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_a_number_that_is_none(http: httpx.AsyncClient, value: str) -> None:
    answer = await http.post(
        COMPLETIONS,
        content=b'{"prompt": "x", "temperature": %s}' % value.encode(),
        headers={"content-type": "application/json"},
    )
    assert error_of(answer, 400)["param"] == "temperature"


async def test_a_body_that_is_no_object(http: httpx.AsyncClient) -> None:
    for body in ("[]", "3", '"x"', "null"):
        answer = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        error_of(answer, 400)


async def test_a_body_that_is_not_sent_as_json(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert "application/json" in error_of(answer, 400)["message"]


async def test_a_body_that_is_too_large_by_its_length_or_while_it_comes(http: httpx.AsyncClient) -> None:
    limit = body_limit(64)
    assert limit < MAX_BODY_BYTES, "no context of 64 tokens needs that"
    blob = b" " * (limit + 1)
    headers = {"content-type": "application/json"}
    error = error_of(await http.post(COMPLETIONS, content=blob, headers=headers), 413)
    assert (error["code"], str(limit) in error["message"]) == ("request_too_large", True)

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(blob), 1 << 20):
            yield blob[start : start + (1 << 20)]

    error_of(await http.post(COMPLETIONS, content=in_pieces(), headers=headers), 413)


async def test_too_many_prompts(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    error = await refused(cluster, http, COMPLETIONS, {"prompt": ["x"] * 65})
    assert "65 prompts" in error["message"]


async def test_unknown_paths_and_methods_have_the_same_shape(http: httpx.AsyncClient) -> None:
    assert error_of(await http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = await http.get(COMPLETIONS)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


async def test_one_bad_prompt_of_several_stops_all(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    await refused(cluster, http, COMPLETIONS, {"prompt": [[5], [999]]})


async def test_a_stream_that_is_refused_has_its_status(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    await refused(cluster, http, COMPLETIONS, {"prompt": "x", "stream": True, "temperature": 2})
