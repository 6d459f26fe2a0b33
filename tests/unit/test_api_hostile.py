"""Hostile bodies on every route that takes one are refused with an error of ours, soon, and harm nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
import pytest_asyncio

from coordinator.api.middleware import MAX_BODY_BYTES, body_limit
from kvpact.contract.jsonform import contract_to_json
from tests.coordinator_fakes import FakeCluster, fake_cluster, make_text_folder
from tests.factories import make_contract

ROUTES = ("/v1/completions", "/v1/chat/completions", "/admin/check", "/admin/drain", "/admin/scale")
JSON = {"content-type": "application/json"}
DEADLINE_S = 20.0
MOST_ANSWER_BYTES = 4096

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeCluster]:
    folder = make_text_folder(tmp_path_factory.mktemp("model"), context=64)
    await asyncio.to_thread(int)  # large bodies are read by a thread of the loop, which lives as long as it
    async with fake_cluster(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client:
        yield client


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def raw_bodies() -> Iterator[bytes]:
    """What is hardly a body."""
    yield from (b"", b"\x00", b"\xff\xfe", b"{", b"null", b"[]", b'"x"', b"NaN", b"1e999", b"-" * 1000)
    yield from (nested(depth) for depth in (100, 900, 5_000, 200_000))
    yield b'{"role":' + b'{"a":' * 900 + b"1" + b"}" * 901
    yield b'{"role":"decode","contract":{"a":' + nested(900) + b"}}"
    yield b'{"prompt":"x","prompt":' + b"9" * 5_000 + b"}"
    yield b'{"worker":"\\ud800","role":"\\udfff"}'


VALUES = (None, True, -1, 2**31, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "\x00\n", "x" * 5_000,
          [], [1] * 3_000, {}, {"a": {"b": []}}, [[[[]]]], "\U0001f600")  # fmt: skip


def field_bodies(valid: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """A valid body with one value gone or another."""
    found = valid
    for step in path:
        found = found[step]
    keys = (
        list(found)
        if isinstance(found, dict)
        else range(min(1, len(found)))
        if isinstance(found, list)
        else ()
    )
    for key in keys:
        for value in VALUES:
            yield with_value(valid, (*path, key), value)
        yield from field_bodies(valid, (*path, key))


def with_value(valid: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place."""
    copy = deepcopy(valid)
    found = copy
    for step in path[:-1]:
        found = found[step]
    found[path[-1]] = value
    return copy


async def answered(http: httpx.AsyncClient, route: str, body: bytes) -> httpx.Response:
    """The answer, which must be no failure of the server's own."""
    async with asyncio.timeout(DEADLINE_S):
        answer = await http.post(route, content=body, headers=JSON)
    assert answer.status_code < 500, (route, body[:200], answer.text[:500])
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
        assert len(answer.content) < MOST_ANSWER_BYTES, (route, body[:60], len(answer.content))
    return answer


async def works(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("route", ROUTES)
async def test_a_route_refuses_what_is_no_body(http: httpx.AsyncClient, route: str) -> None:
    for body in raw_bodies():
        answer = await answered(http, route, body)
        assert answer.status_code >= 400
    await works(http)


@pytest.mark.parametrize(
    ("route", "valid"),
    [
        ("/admin/check", {"role": "decode", "contract": contract_to_json(make_contract(layers=1))}),
        ("/admin/drain", {"worker": "nobody"}),
        ("/admin/scale", {"prefill": 1, "decode": 1}),
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1, "stop": ["z"], "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
async def test_a_route_refuses_or_serves_any_value_of_a_field(
    http: httpx.AsyncClient, route: str, valid: dict[str, Any]
) -> None:
    statuses = set()
    for body in field_bodies(valid):
        answer = await answered(http, route, json.dumps(body).encode())
        statuses.add(answer.status_code)
    assert 400 in statuses
    await works(http)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_beyond_the_limit_is_refused_while_it_comes(http: httpx.AsyncClient, route: str) -> None:
    limit = body_limit(64)
    assert limit <= MAX_BODY_BYTES

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(2 * limit // 65_536):
            yield b" " * 65_536

    async with asyncio.timeout(DEADLINE_S):
        answer = await http.post(route, content=endless(), headers=JSON)
    assert answer.status_code == 413
    await works(http)


async def test_a_contract_with_a_table_for_every_length_is_refused_soon(http: httpx.AsyncClient) -> None:
    contract = contract_to_json(make_contract(layers=1))
    rotary = contract["layers"][0]["rotary"]
    table = {"inv_freq": rotary["inv_freq"], "amplitude": rotary["amplitude"]}
    rotary["tables"] = [table | {"upper_length": length} for length in range(1, 3_000)]
    rotary["tables"].append(table | {"upper_length": None})
    answer = await answered(
        http, "/admin/check", json.dumps({"role": "decode", "contract": contract}).encode()
    )
    assert answer.status_code == 400
    assert "at most 64" in answer.json()["error"]["message"]
    await works(http)


async def test_a_number_of_workers_that_is_a_slip_is_refused(http: httpx.AsyncClient) -> None:
    answer = await answered(http, "/admin/scale", b'{"prefill": 2147483648}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prefill")
