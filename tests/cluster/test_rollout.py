"""Workers come, are refused, drained and ended while requests run; no answer is lost, cut or wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpact.errors import Unavailable
from tests.cluster.clusters import KVPACT, UpCluster, environment, up
from tests.cluster.processes import Served
from tests.cluster.steps import decode, hand_over
from tests.cluster.traffic import Asked, traffic
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(240)

PREFILL_CACHE = {"key_state": "raw", "block_size": 32}
JOINING = {"cache": {"key_state": "rotated", "axis_order": "HND", "block_size": 24, "blocks": 2000}}
"""More blocks than the others have: of idle workers it is the first choice."""
LONG_OUTPUT, LONG_PROMPT = 1200, prompt_of(3900, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, folder: Path) -> Iterator[UpCluster]:
    """One prefill and two decode workers on a Ray of this machine."""
    config = write_config(folder / "base.yaml", tiny_llama, decode={"cache": {"blocks": 1000}})
    flags = ("--config", str(config), "--decode", "2")
    with up(tiny_llama, *flags, log=folder / "up.log", stop=signal.SIGTERM) as running:
        yield running


def write_config(path: Path, model: Path, **sides: Any) -> Path:
    settings = {"model": str(model), "engine": {"prefill_chunk_tokens": 16, "threads": 1}}
    path.write_text(yaml.safe_dump(settings | {"prefill": {"cache": PREFILL_CACHE}} | sides))
    return path


@contextlib.contextmanager
def joined(cluster: UpCluster, role: str, name: str, config: Path) -> Iterator[Served]:
    """A worker of its own that registers with the cluster; it ends well at last."""
    flags = ("--config", str(config), "--name", name, "--coordinator", cluster.first_line["registration"])
    log = config.with_name(name)
    worker = Served(module=f"{role}_worker", flags=flags, says="serving ", log=log)
    worker.launch()
    try:
        worker.serving()
        eventually(lambda: name in cluster.workers())
        yield worker
    finally:
        worker.stop()


def endpoint(worker: Served) -> str:
    return worker.serving().split()[-1]


def health(worker: Served, service: str) -> str:
    """Status that the worker's health service tells under a name."""
    with grpc.insecure_channel(endpoint(worker)) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def ready(worker: Served) -> bool:
    return health(worker, "kvpact.ready") == "SERVING"


def log_of(worker: Served) -> str:
    return worker.log.with_suffix(".1.log").read_text()


def kvpact(cluster: UpCluster, *command: str) -> tuple[int, str]:
    """Exit code and standard output of a command about this cluster."""
    done = subprocess.run([*KVPACT, *command], capture_output=True, text=True, env=environment(), timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def committed(cluster: UpCluster, worker: str) -> int:
    count: int = cluster.workers()[worker]["counters"]["committed_handoffs"]
    return count


def elsewhere(cluster: UpCluster, name: str) -> int:
    """Handoffs that other decode workers than this one took."""
    others = [each for each in cluster.workers().values() if each["worker"] != name and "counters" in each]
    return sum(each["counters"]["committed_handoffs"] for each in others if each["role"] == "decode")


def refusing(verdict: dict[str, Any]) -> list[str]:
    return [each["field"] for each in verdict["differences"] if each["action"] == "reject"]


def exit_code(worker: Served) -> int:
    assert worker.running is not None
    code, worker.running = worker.running.wait(60), None
    assert "Traceback" not in log_of(worker)
    return code


def test_a_decode_worker_with_another_frequency_table_never_becomes_ready_and_the_others_go_on(
    cluster: UpCluster, tiny_llama: Path, folder: Path
) -> None:
    other = {"override": {"rope_theta": 500000.0}}
    config = write_config(folder / "theta.yaml", tiny_llama, decode=other)
    gate = ("contract", "check", "--against-cluster", cluster.url, "--role", "decode", "--json", "--config")
    with traffic(cluster.url, tiny_llama) as asked:
        code, told = kvpact(cluster, *gate, str(config))
        assert (code, json.loads(told)["usable"]) == (20, False)
        assert refusing(json.loads(told)["partners"][0]) == ["inv_freq"]
        assert kvpact(cluster, *gate, str(folder / "base.yaml"))[0] == 0
        with joined(cluster, "decode", "decode-theta", config) as worker:
            eventually(lambda: "not ready: " in log_of(worker) and "inv_freq" in log_of(worker))
            enough = asked.right + 10
            eventually(lambda: asked.right >= enough)
            assert (health(worker, ""), ready(worker)) == ("SERVING", False)
            assert committed(cluster, "decode-theta") == 0
            code, told = kvpact(cluster, "status", "--url", cluster.url, "--json")
            assert (code, json.loads(told)["ready"]) == (0, True)
            (pair,) = (each for each in json.loads(told)["pairs"] if each["decode"] == "decode-theta")
            assert (pair["verdict"], pair["usable"]) == ("reject", False)
            assert refusing(pair) == ["inv_freq"]
            code, told = kvpact(cluster, "status", "--url", cluster.url)
            assert code == 0
            assert "inv_freq: " in told
    asked.check()
    assert "prefill-0 with decode-theta get no requests: they differ in inv_freq" in (
        (folder / "up.log").read_text()
    )


def test_a_worker_with_another_cache_takes_over_from_one_that_is_drained_and_ended(
    cluster: UpCluster, tiny_llama: Path, folder: Path
) -> None:
    config = write_config(folder / "next.yaml", tiny_llama, decode=JOINING)
    with traffic(cluster.url, tiny_llama) as asked:
        eventually(lambda: asked.right >= 5)
        with joined(cluster, "decode", "decode-next", config) as worker:
            eventually(lambda: ready(worker))
            pairs = {pair["decode"]: pair for pair in cluster.get("/admin/pairs")["pairs"]}
            assert (pairs["decode-next"]["verdict"], pairs["decode-next"]["usable"]) == ("convert", True)
            assert {each["field"] for each in pairs["decode-next"]["differences"]} >= {
                "block_size",
                "key_state",
            }
            code, told = kvpact(cluster, "drain", "decode-1", "--url", cluster.url, "--json")
            assert (code, json.loads(told)) == (0, {"workers": {"decode-1": 0}, "idle": True})
            drained, before = committed(cluster, "decode-1"), committed(cluster, "decode-next")
            enough = asked.right + 20
            eventually(lambda: asked.right >= enough)
            assert committed(cluster, "decode-1") == drained
            assert committed(cluster, "decode-next") > before
            assert cluster.workers()["decode-1"]["draining"]
            post = {"decode": 1, "prefill": 1}
            assert cluster.post("/admin/scale", post)["leaving"] == ["decode-1"]
            eventually(lambda: "decode-1" not in cluster.workers())
            enough = asked.right + 5
            eventually(lambda: asked.right >= enough)
            worker.stop()
            enough = asked.right + 5
            eventually(lambda: asked.right >= enough)
    asked.check()


def test_a_decode_worker_that_is_told_to_end_finishes_its_stream_and_serves_what_it_holds(
    cluster: UpCluster, tiny_llama: Path, folder: Path
) -> None:
    config = write_config(folder / "late.yaml", tiny_llama, decode=JOINING)
    prompt, other = prompt_of(40), prompt_of(50)
    expected = golden(tiny_llama, prompt, LONG_OUTPUT).token_ids
    asked = Asked(prompt, LONG_OUTPUT, streamed=True)
    with joined(cluster, "decode", "decode-late", config) as worker, ThreadPoolExecutor(1) as client:
        eventually(lambda: ready(worker))
        answer = client.submit(asked.of, cluster.url)
        assert asked.started.wait(60)
        # The first token comes from the prefill worker, a moment before the decode worker begins.
        eventually(lambda: cluster.workers()["decode-late"]["running_requests"] == 1)
        first, job = hand_over(cluster, "decode-late", other)
        worker.send(signal.SIGTERM)
        eventually(lambda: not ready(worker))
        others = elsewhere(cluster, "decode-late")
        assert Asked(other, 9, streamed=False).of(cluster.url) == golden(tiny_llama, other, 9).token_ids
        assert elsewhere(cluster, "decode-late") == others + 1
        assert (first, *decode(endpoint(worker), job)) == golden(tiny_llama, other, 9).token_ids
        assert answer.result(60) == expected
        assert exit_code(worker) == 0


def test_a_second_signal_ends_a_worker_at_once_and_its_stream_goes_on_elsewhere(
    cluster: UpCluster, tiny_llama: Path, folder: Path
) -> None:
    config = write_config(folder / "hurry.yaml", tiny_llama, decode=JOINING)
    prompt = prompt_of(40)
    asked = Asked(prompt, LONG_OUTPUT, streamed=True)
    with joined(cluster, "decode", "decode-hurry", config) as worker, ThreadPoolExecutor(1) as client:
        eventually(lambda: ready(worker))
        before = elsewhere(cluster, "decode-hurry")
        answer = client.submit(asked.of, cluster.url)
        assert asked.started.wait(60)
        worker.send(signal.SIGTERM)
        eventually(lambda: not ready(worker))
        worker.send(signal.SIGTERM)
        assert exit_code(worker) == 0
        assert not answer.done(), "the output was to be longer"
        assert answer.result(60) == golden(tiny_llama, prompt, LONG_OUTPUT).token_ids
    assert elsewhere(cluster, "decode-hurry") == before + 1


def test_a_prefill_worker_that_is_told_to_end_finishes_its_prompt_and_takes_no_other(
    cluster: UpCluster, tiny_llama: Path, folder: Path
) -> None:
    config = write_config(folder / "prefill.yaml", tiny_llama)
    with joined(cluster, "prefill", "prefill-late", config) as worker, ThreadPoolExecutor(1) as client:
        eventually(lambda: ready(worker))
        told = client.submit(hand_over, cluster, "decode-0", LONG_PROMPT, "prefill-late")
        eventually(lambda: cluster.workers()["prefill-late"]["running_requests"])
        worker.send(signal.SIGTERM)
        eventually(lambda: not ready(worker))
        assert not told.done(), "the prompt was to be longer"
        with pytest.raises(Unavailable, match="draining"):
            hand_over(cluster, "decode-0", LONG_PROMPT, "prefill-late")
        prompt = prompt_of(50)
        assert Asked(prompt, 9, streamed=False).of(cluster.url) == golden(tiny_llama, prompt, 9).token_ids
        first, job = told.result(60)
        assert exit_code(worker) == 0
        expected = golden(tiny_llama, LONG_PROMPT, 9).token_ids
        assert (first, *decode(cluster.workers()["decode-0"]["endpoint"], job)) == expected


def test_up_that_is_told_to_end_finishes_its_streams(cluster: UpCluster, tiny_llama: Path) -> None:
    prompt = prompt_of(40)
    asked = Asked(prompt, LONG_OUTPUT, streamed=True)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(asked.of, cluster.url)
        assert asked.started.wait(60)
        os.kill(cluster.pid, signal.SIGTERM)
        assert answer.result(60) == golden(tiny_llama, prompt, LONG_OUTPUT).token_ids
    eventually(lambda: psutil.Process(cluster.pid).status() == psutil.STATUS_ZOMBIE)
