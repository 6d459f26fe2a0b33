"""What clients are told when workers fail, refuse each other or are missing; and who may ask."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, AuthenticationError, InternalServerError, RateLimitError

from coordinator.api.errors import TO_STRANGERS
from coordinator.coordinator import Coordinator
from kvpact.config import ApiConfig, Config
from kvpact.errors import (
    ERROR_CODES,
    BadRequest,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    Unavailable,
    UnknownHandoff,
)
from kvpact.types import VerdictWord
from tests.coordinator_fakes import FakeCluster, fake_cluster, make_text_folder, make_verdict

COMPLETIONS = "/v1/completions"
ASK = {"prompt": "x", "max_tokens": 4}


def refuse(cluster: FakeCluster) -> None:
    """Makes every pair a refused one."""
    verdict = make_verdict(VerdictWord.REJECT, fields=["inv_freq", "kv_heads"])
    cluster.prefill.verdicts = lambda decode: verdict


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(make_text_folder(tmp_path)) as running:
        yield running


@pytest.fixture
async def http(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_no_compatible_pair_is_told_with_names_relations_values_and_remedies(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=refuse) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post(COMPLETIONS, json=ASK | {"stream": stream})
        assert answer.status_code == 503
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        error = answer.json()["error"]
        assert error["code"] == "no_compatible_pair"
        assert "inv_freq, kv_heads; serve both with one inv_freq" in error["message"]
        assert error["differences"][0] == {
            "field": "inv_freq",
            "layers": [0, 1],
            "relation": "incompatible",
            "action": "reject",
            "remedy": "serve both with one inv_freq",
            "writer": "inv_freq of the writer",
            "reader": "inv_freq of the reader",
            "explanation": "inv_freq matters",
        }
        assert cluster.prefill.requests == [], "refused before any prefill"
        ready = await http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reasons"][0]["code"] == "no_compatible_pair"
        assert not cluster.coordinator.readiness()[0]


async def test_the_openai_client_does_not_try_a_refused_pair_again(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), prepare=refuse) as cluster:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=5) as client:
            with pytest.raises(InternalServerError) as failure:
                await client.completions.create(model="fake", prompt="x")
        assert failure.value.code == "no_compatible_pair"
        text = (await _metrics(cluster)).splitlines()
        assert any('code="no_compatible_pair"' in line and line.endswith(" 1.0") for line in text)


async def test_a_stranger_is_not_shown_values(tmp_path: Path) -> None:
    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=refuse) as cluster,
        _stranger(cluster) as http,
    ):
        told = (await http.post(COMPLETIONS, json=ASK)).json()["error"]["differences"][0]
        assert set(told) == {"field", "layers", "relation", "action", "remedy"}
        pairs = (await http.get("/admin/pairs")).json()["pairs"]
        assert "writer" not in json.dumps(pairs)
        assert "decode-0" not in json.dumps(pairs)
        assert (await http.get("/admin/workers")).status_code == 403


FAULTS = [
    (Unavailable("can't reach 10.0.0.7:4001"), 503, "unavailable"),
    (Exhausted("decode-0 has 64 of 64 blocks taken", retry_after_s=2), 429, "exhausted"),
    (DataLoss("chunk 3 from prefill-0", check="checksum"), 500, "data_loss"),
    (UnknownHandoff("decode-0 knows no such handoff", handoff_id=b"h" * 16), 500, "unknown_handoff"),
    (Fenced("decode-0 runs another life", expected="a", found="b"), 503, "fenced"),
    (KvpactError("10.0.0.7:4001: INTERNAL"), 500, "internal"),
    (BadRequest("10.0.0.7:4001: INVALID_ARGUMENT", code="odd"), 400, "odd"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=[code for *_, code in FAULTS])
async def test_a_stranger_is_told_no_worker_name_and_the_log_is(
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    fault: KvpactError,
    status: int,
    code: str,
    stream: bool,
) -> None:
    cluster.prefill.faults += [fault, fault]
    with caplog.at_level(logging.INFO, "coordinator.api.context"):
        async with _stranger(cluster) as http:
            answer = await http.post(COMPLETIONS, json=ASK | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    for hidden in ("10.0.0.7", "decode-0", "prefill-0"):
        assert hidden not in answer.text
    assert str(fault) in caplog.text


async def test_a_neighbour_is_told_the_whole_text(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    cluster.prefill.faults += [DataLoss("chunk 3 from prefill-0", check="checksum")]
    answer = await http.post(COMPLETIONS, json=ASK)
    assert answer.json()["error"]["message"] == "chunk 3 from prefill-0"


async def test_a_stranger_is_still_told_what_is_wrong_with_its_body(cluster: FakeCluster) -> None:
    async with _stranger(cluster) as http:
        answer = await http.post(COMPLETIONS, json={"prompt": ""})
        assert "prompt is empty" in answer.json()["error"]["message"]
        assert "does not exist" in (await http.get("/v1/models/other")).json()["error"]["message"]


async def test_a_stranger_is_shown_no_worker_name_by_readiness_or_metrics(tmp_path: Path) -> None:
    def break_pairing(cluster: FakeCluster) -> None:
        cluster.prefill.connect_faults += [DataLoss("decode-0 is off by 3", check="canary")]

    folder = make_text_folder(tmp_path)
    async with fake_cluster(folder, register=False, prepare=break_pairing) as cluster:
        for worker in (cluster.prefill, cluster.decode):
            await worker.register(cluster.grpc_endpoint)
        async with _stranger(cluster) as http:
            texts = [(await http.get(path)).text for path in ("/ready", "/metrics", "/admin/pairs")]
        for text in texts:
            assert "decode-0" not in text
        assert "unavailable" in texts[0]
        assert 'kvpact_blocks{role="decode",state="free",worker="1"} 64.0' in texts[1]


def test_strangers_are_told_something_of_every_error() -> None:
    assert set(TO_STRANGERS) == set(ERROR_CODES)


async def test_a_stranger_with_a_key_is_shown_values(tmp_path: Path) -> None:
    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=refuse, api_keys=("k1", "k2")) as cluster,
        _stranger(cluster) as http,
    ):
        assert (await http.get("/admin/pairs")).status_code == 401
        answer = await http.get("/admin/pairs", headers={"Authorization": "Bearer k2"})
        assert answer.json()["pairs"][0]["differences"][0]["writer"] == "inv_freq of the writer"


def _stranger(cluster: FakeCluster) -> httpx.AsyncClient:
    """A client that comes from another machine, by the address that the server is told."""
    app = cluster.coordinator._http._server.config.app
    transport = httpx.ASGITransport(app=app, client=("203.0.113.9", 1))
    return httpx.AsyncClient(base_url="http://far", transport=transport)


async def test_workers_that_are_missing_give_a_retryable_503(tmp_path: Path) -> None:
    async with (
        fake_cluster(make_text_folder(tmp_path), prefill=0, decode=0) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post(COMPLETIONS, json=ASK)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "no prefill worker" in answer.json()["error"]["message"]
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200


async def test_a_full_worker_gives_429_and_when_to_come_back(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    cluster.prefill.faults.append(Exhausted("64 of 64 blocks are taken", retry_after_s=2.5))
    answer = await http.post(COMPLETIONS, json=ASK)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert "64 of 64 blocks" in answer.json()["error"]["message"]


async def test_the_openai_client_sees_its_own_exception_types(cluster: FakeCluster) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for fault, kind in (
            (Exhausted("full", retry_after_s=1), RateLimitError),
            (DataLoss("bits flipped", check="checksum"), InternalServerError),
        ):
            cluster.prefill.faults.append(fault)
            with pytest.raises(kind):
                await client.completions.create(model="fake", prompt="x", max_tokens=4)


async def test_a_failure_after_the_headers_is_an_event_and_then_done(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.fail_after = 2
    cluster.prefill.faults.append(Unavailable("tripped first"))
    cluster.decode.faults.append(BadRequest("tripped second"))
    answer = await http.post(COMPLETIONS, json=ASK | {"stream": True, "max_tokens": 9})
    assert answer.status_code == 200
    *_, error, done = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "tripped second"
    assert done == "data: [DONE]"


async def test_the_openai_client_raises_the_error_of_a_stream(cluster: FakeCluster) -> None:
    cluster.decode.faults.append(BadRequest("tripped"))
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="fake", prompt="x", max_tokens=4, stream=True)
        with pytest.raises(APIError, match="tripped"):
            async for _ in stream:
                pass


async def test_a_key_is_needed_where_keys_are_set(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), api_keys=("secret",)) as cluster:
        for key in ("wrong", "secre", "secret2"):
            async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(AuthenticationError, match="API key"):
                    await client.models.list()
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="secret", max_retries=0) as client:
            assert (await client.models.list()).data[0].id == "fake"
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            assert (await http.get("/v1/models")).headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/ready", "/metrics", "/version"):
                assert (await http.get(path)).status_code == 200


def test_a_server_that_others_can_reach_needs_keys_or_an_explicit_word(tmp_path: Path) -> None:
    folder = make_text_folder(tmp_path)
    with pytest.raises(BadRequest, match=r"api\.api_keys is empty"):
        Coordinator(Config(api=ApiConfig(host="0.0.0.0")), folder)
    Coordinator(Config(api=ApiConfig(host="0.0.0.0", insecure=True)), folder)
    Coordinator(Config(api=ApiConfig(host="0.0.0.0", api_keys=("k",))), folder)


async def test_a_port_that_is_taken_is_named(cluster: FakeCluster, tmp_path: Path) -> None:
    port = int(cluster.url.rsplit(":", 1)[1])
    second = Coordinator(Config(api=ApiConfig(port=port)), tmp_path)
    with pytest.raises(Unavailable, match=str(port)):
        await second.start()


async def test_a_request_id_is_kept_and_a_strange_one_replaced(http: httpx.AsyncClient) -> None:
    kept = await http.post(COMPLETIONS, json=ASK, headers={"X-Request-Id": "my-id.7"})
    assert kept.headers["x-request-id"] == "my-id.7"
    assert kept.json()["id"] == "cmpl-my-id.7"
    made = await http.get("/health", headers={"X-Request-Id": "a b\tc"})
    assert len(made.headers["x-request-id"]) == 32


async def test_the_model_is_listed_and_described(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0] | {"created": 0} == {
        "id": "fake",
        "object": "model",
        "created": 0,
        "owned_by": "kvpact",
        "root": "fake",
        "parent": None,
        "max_model_len": 128,
    }
    assert (await http.get("/v1/models/fake")).json()["id"] == "fake"
    assert (await http.get("/v1/models/org/other")).status_code == 404


async def test_status_routes_tell_about_pairs_and_workers(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/ready")).json() == {"ready": True, "reasons": []}
    assert (await http.get("/ping")).json() == {"status": "ok"}
    assert (await http.get("/version")).json()["version"]
    pair: dict[str, Any] = (await http.get("/admin/pairs")).json()["pairs"][0]
    assert (pair["prefill"], pair["decode"], pair["usable"], pair["verdict"]) == (
        "prefill-0",
        "decode-0",
        True,
        "accept",
    )
    workers = (await http.get("/admin/workers")).json()["workers"]
    assert [(worker["worker"], worker["role"]) for worker in workers] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
    ]
    assert workers[0]["blocks"] == {"free": 64, "total": 64, "held": {}, "cached": 0}
    assert workers[0]["counters"]["computed_prompt_tokens"] == 0


async def test_a_worker_that_does_not_answer_is_still_listed(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    await cluster.decode.die()
    workers = (await http.get("/admin/workers")).json()["workers"]
    assert "trouble" in workers[1]
    assert "blocks" not in workers[1]


async def _metrics(cluster: FakeCluster) -> str:
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        return (await http.get("/metrics")).text
