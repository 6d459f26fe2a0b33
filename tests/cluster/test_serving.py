"""`kvpact up` in front of real clients: text, streams, bad input, disconnects, batching, a killed process."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.clusters import UpCluster, up
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(180)
DEADLINE_S = 60.0
LEASE_S = 30.0


def client(cluster: UpCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S)


def complete(cluster: UpCluster, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Token ids of a completion that ignores end tokens."""
    with client(cluster) as connection:
        answer = connection.completions.create(
            model="tiny-llama",
            prompt=list(prompt),
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    token_ids: list[int] = answer.choices[0].model_extra["token_ids"]
    return token_ids


def all_blocks_free(cluster: UpCluster) -> bool:
    return all(worker["blocks"]["free"] == worker["blocks"]["total"] for worker in cluster.workers().values())


def forward_steps(cluster: UpCluster) -> int:
    return sum(worker["counters"]["forward_steps"] for worker in cluster.workers().values())


@pytest.mark.parametrize("length", [1, 16, 23, 24, 25, 48, 97])
def test_tokens_over_http_equal_transformers(mixed_cluster: UpCluster, tiny_llama: Path, length: int) -> None:
    prompt = prompt_of(length)
    assert tuple(complete(mixed_cluster, prompt, 32)) == golden(tiny_llama, prompt, 32).token_ids


def test_the_verdict_of_a_mixed_pair_is_convert(mixed_cluster: UpCluster) -> None:
    (pair,) = mixed_cluster.get("/admin/pairs")["pairs"]
    assert pair["verdict"] == "convert"
    assert {difference["field"] for difference in pair["differences"]} == {
        "key_state",
        "axis_order",
        "block_size",
    }
    assert all(step["exactness"] in ("bit_exact", "rounding") for step in pair["plan"])


def test_a_stream_brings_the_same_text_with_usage(mixed_cluster: UpCluster) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with client(mixed_cluster) as connection:
        whole = connection.chat.completions.create(model="tiny-llama", messages=messages, max_tokens=12)
        stream = connection.chat.completions.create(
            model="tiny-llama",
            messages=messages,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 1


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [5] * 5000}, 400, "4096"),
        ({"prompt": [99999]}, 400, "99999"),
        ({"prompt": [-1]}, 400, "-1"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"model": "another"}, 404, "another"),
        ({"temperature": 0.7}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
    ],
    ids=str,
)
def test_bad_input_is_refused_and_the_next_request_works(
    mixed_cluster: UpCluster, body: dict[str, Any], status: int, says: str
) -> None:
    request: Any = {"model": "tiny-llama", "prompt": "hi", "max_tokens": 4} | body
    with client(mixed_cluster) as connection, pytest.raises(openai.APIStatusError) as caught:
        connection.completions.create(**request)
    assert caught.value.status_code == status
    assert says in caught.value.message
    assert len(complete(mixed_cluster, (5, 6, 7), 3)) == 3
    assert all_blocks_free(mixed_cluster)


def test_malformed_json_is_refused(mixed_cluster: UpCluster) -> None:
    host, port = mixed_cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        body = b'{"model": "tiny-llama", "prompt": '
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 2), (None, 16)])
def test_max_tokens_counts_every_token(mixed_cluster: UpCluster, asked: int | None, given: int) -> None:
    before = mixed_cluster.workers()["decode-0"]["counters"]["committed_handoffs"]
    with client(mixed_cluster) as connection:
        limit: dict[str, Any] = {} if asked is None else {"max_tokens": asked}
        answer = connection.completions.create(
            model="tiny-llama", prompt=[7, 8, 9], extra_body={"ignore_eos": True}, **limit
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == given
    assert answer.choices[0].finish_reason == "length"
    handed_over = mixed_cluster.workers()["decode-0"]["counters"]["committed_handoffs"] - before
    assert handed_over == (0 if given == 1 else 1)


def test_a_client_that_leaves_mid_stream_frees_every_block(mixed_cluster: UpCluster) -> None:
    before = mixed_cluster.workers()["decode-0"]["counters"]["computed_output_tokens"]
    with client(mixed_cluster) as connection:
        stream = connection.completions.create(
            model="tiny-llama", prompt=[5] * 40, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(3), stream, strict=False):
            continue
        stream.close()
    eventually(lambda: all_blocks_free(mixed_cluster), LEASE_S)
    computed = mixed_cluster.workers()["decode-0"]["counters"]["computed_output_tokens"] - before
    assert 2 <= computed < 4000


def test_eight_at_once_take_less_than_half_the_steps_of_eight_in_turn(mixed_cluster: UpCluster) -> None:
    prompts = [prompt_of(40 + index, seed=3) for index in range(8)]
    start = forward_steps(mixed_cluster)
    serial = [complete(mixed_cluster, prompt, 48) for prompt in prompts]
    serial_steps = forward_steps(mixed_cluster) - start
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda prompt: complete(mixed_cluster, prompt, 48), prompts))
    concurrent_steps = forward_steps(mixed_cluster) - start - serial_steps
    assert together == serial
    assert serial_steps == 8 * 48
    assert concurrent_steps < serial_steps / 2


def test_a_killed_decode_process_comes_back_as_another_incarnation(
    mixed_cluster: UpCluster, tiny_llama: Path
) -> None:
    before = mixed_cluster.workers()["decode-0"]
    os.kill(before["pid"], signal.SIGKILL)

    def restarted() -> bool:
        now = mixed_cluster.workers().get("decode-0", before)
        return now["incarnation"] != before["incarnation"] and mixed_cluster.get("/ready")["ready"]

    eventually(restarted)
    assert mixed_cluster.workers()["decode-0"]["pid"] != before["pid"]
    prompt = prompt_of(33)
    assert tuple(complete(mixed_cluster, prompt, 16)) == golden(tiny_llama, prompt, 16).token_ids


def test_no_compatible_pair_is_a_503_that_names_the_field(tiny_llama: Path, tmp_path: Path) -> None:
    with up(tiny_llama, "--decode-override", "rope_theta=500000", log=tmp_path / "up.log") as cluster:
        assert cluster.first_line["ready"] is False
        with client(cluster) as connection, pytest.raises(openai.APIStatusError) as caught:
            connection.completions.create(model="tiny-llama", prompt="hi", max_tokens=4)
        assert cluster.get("/ready")["ready"] is False
        assert cluster.workers()["prefill-0"]["counters"]["computed_prompt_tokens"] == 0
    assert caught.value.status_code == 503
    assert caught.value.code == "no_compatible_pair"
    assert caught.value.response.headers["x-should-retry"] == "false"
    (difference,) = caught.value.body["differences"]  # type: ignore[index]
    assert difference["field"] == "inv_freq"
    assert difference["remedy"]


def test_sigterm_drains_and_a_second_one_ends_the_stream_with_an_error(
    tiny_llama: Path, tmp_path: Path
) -> None:
    log = tmp_path / "up.log"
    with up(tiny_llama, log=log, stop=signal.SIGTERM) as cluster, client(cluster) as connection:
        stream = connection.completions.create(
            model="tiny-llama", prompt=[5] * 40, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        os.kill(cluster.pid, signal.SIGTERM)
        eventually(lambda: "waiting up to 60 s for 1 request" in log.read_text())
        os.kill(cluster.pid, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
    assert "Traceback" not in log.read_text()
