"""Workers killed, or stopped for longer than a lease: each request ends once, and blocks come back."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import Processes, Served, processes
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(240)

LEASE_S = 2.0
PROMPT = prompt_of(3000)
"""Prefilled in many steps, so that its handoff takes long enough to be met under way."""
SHORT_PROMPT = prompt_of(40)
LONG_OUTPUT = 400
BOUND_S = 45.0
"""In which the first new request is answered after a worker came back."""
CONFIG = f"""
handoff: {{lease_s: {LEASE_S}}}
engine: {{prefill_chunk_tokens: 16, prefix_cache: false}}
prefill: {{cache: {{key_state: raw, axis_order: HND, block_size: 24}}}}
"""


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Three processes whose pair converts, with leases of LEASE_S."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    with processes(tiny_llama, folder / "config.yaml", folder) as running:
        yield running


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def complete(cluster: Processes, prompt: tuple[int, ...], tokens: int) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of a completion that ignores end tokens."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body | {"ignore_eos": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def transferring(cluster: Processes) -> bool:
    """Whether the long prompt is under way: blocks are set aside, and part of it is computed."""
    computed = cluster.describe(cluster.prefill).counters.computed_prompt_tokens
    return cluster.held_blocks(cluster.decode) > 0 and computed % len(PROMPT) > 100


def decoding(cluster: Processes) -> bool:
    """Whether an output is under way."""
    return cluster.describe(cluster.decode).load.running_requests > 0


def ended_once(asked: Future[tuple[int, dict[str, Any]]], expected: tuple[int, ...]) -> None:
    """The right tokens, or an error that says it is the server's and worth another try."""
    status, body = asked.result(120)
    if status == 200:
        assert tuple(body["choices"][0]["token_ids"]) == expected
    else:
        assert status == 503, body
        assert body["error"]["message"]


def nothing_held(cluster: Processes, *workers: Served) -> None:
    for worker in workers:
        eventually(lambda worker=worker: cluster.held_blocks(worker) == 0)


def works(cluster: Processes, model: Path) -> None:
    """The first new request is right, within a bounded time, and leaves nothing behind."""
    eventually(cluster.ready, BOUND_S)
    status, body = complete(cluster, SHORT_PROMPT, 9)
    assert status == 200, body
    assert tuple(body["choices"][0]["token_ids"]) == golden(model, SHORT_PROMPT, 9).token_ids
    nothing_held(cluster, cluster.prefill, cluster.decode)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_killed_in_the_middle_of_a_transfer_comes_back_at_its_address_and_the_other_goes_on(
    cluster: Processes, asking: ThreadPoolExecutor, tiny_llama: Path, victim: str
) -> None:
    killed = getattr(cluster, victim)
    survivor = cluster.decode if victim == "prefill" else cluster.prefill
    before, other = cluster.describe(killed), cluster.describe(survivor)
    asked = asking.submit(complete, cluster, PROMPT, 5)
    eventually(lambda: transferring(cluster))
    killed.kill()
    nothing_held(cluster, survivor)
    cluster.restart(killed)
    ended_once(asked, golden(tiny_llama, PROMPT, 5).token_ids)
    works(cluster, tiny_llama)
    assert cluster.describe(killed).life.incarnation != before.life.incarnation
    after = cluster.describe(survivor)
    assert (after.life, after.pid) == (other.life, other.pid)
    assert after.counters.failed_handoffs > other.counters.failed_handoffs


def test_a_decode_worker_killed_in_the_middle_of_an_output_loses_and_repeats_no_token(
    cluster: Processes, asking: ThreadPoolExecutor, tiny_llama: Path
) -> None:
    other = cluster.describe(cluster.prefill)
    asked = asking.submit(complete, cluster, SHORT_PROMPT, LONG_OUTPUT)
    eventually(lambda: decoding(cluster))
    cluster.decode.kill()
    nothing_held(cluster, cluster.prefill)
    cluster.restart(cluster.decode)
    ended_once(asked, golden(tiny_llama, SHORT_PROMPT, LONG_OUTPUT).token_ids)
    works(cluster, tiny_llama)
    assert cluster.describe(cluster.prefill).life == other.life


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_stopped_for_longer_than_a_lease_in_a_transfer_wakes_up_fenced(
    cluster: Processes, asking: ThreadPoolExecutor, tiny_llama: Path, victim: str
) -> None:
    stopped = getattr(cluster, victim)
    survivor = cluster.decode if victim == "prefill" else cluster.prefill
    lives = [cluster.describe(worker).life for worker in (cluster.prefill, cluster.decode)]
    failed = cluster.describe(cluster.decode).counters.failed_handoffs
    asked = asking.submit(complete, cluster, PROMPT, 5)
    eventually(lambda: transferring(cluster))
    stopped.send(signal.SIGSTOP)
    nothing_held(cluster, survivor)
    stopped.send(signal.SIGCONT)
    ended_once(asked, golden(tiny_llama, PROMPT, 5).token_ids)
    works(cluster, tiny_llama)
    assert [cluster.describe(worker).life for worker in (cluster.prefill, cluster.decode)] == lives
    assert cluster.describe(cluster.decode).counters.failed_handoffs > failed


def test_a_decode_worker_stopped_in_the_middle_of_an_output_goes_on_where_it_was(
    cluster: Processes, asking: ThreadPoolExecutor, tiny_llama: Path
) -> None:
    asked = asking.submit(complete, cluster, SHORT_PROMPT, LONG_OUTPUT)
    eventually(lambda: decoding(cluster))
    cluster.decode.send(signal.SIGSTOP)
    nothing_held(cluster, cluster.prefill)
    eventually(lambda: not cluster.ready())
    cluster.decode.send(signal.SIGCONT)
    ended_once(asked, golden(tiny_llama, SHORT_PROMPT, LONG_OUTPUT).token_ids)
    works(cluster, tiny_llama)
