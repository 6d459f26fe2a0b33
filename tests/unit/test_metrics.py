"""What /metrics shows after known work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from coordinator.accounting import Account
from kvpact.clock import ManualClock
from kvpact.errors import DataLoss
from kvpact.handoff.messages import CanaryOutcome
from kvpact.metrics import Metrics
from kvpact.types import BlockCounts, FinishReason, Role, VerdictWord, WorkerCounters
from tests.coordinator_fakes import FakeCluster, fake_cluster, make_load, make_text_folder, make_verdict


async def scraped(cluster: FakeCluster) -> dict[tuple[str, ...], float]:
    """Samples by name and label values in the order of label names."""
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Samples of an exposition."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_work_is_counted(tmp_path: Path) -> None:
    def convert(cluster: FakeCluster) -> None:
        cluster.prefill.verdicts = lambda decode: make_verdict(VerdictWord.CONVERT, fields=["axis_order"])

    async with fake_cluster(make_text_folder(tmp_path), prepare=convert) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5})
            await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
            await http.post("/v1/completions", json={"prompt": ""})
        found = await scraped(cluster)
    assert found["kvpact_handoffs_total", "committed"] == 1
    assert found["kvpact_handoff_bytes_total",] == 1000
    assert found["kvpact_handoff_seconds_sum",] == 0.01
    assert found["kvpact_handoff_exposed_seconds_sum",] == 0.001
    assert found["kvpact_contract_differences_total", "convert", "axis_order"] == 1
    assert found["kvpact_pairs", "convert"] == 1
    assert found["kvpact_blocks", "decode", "free", "decode-0"] == 64
    assert found["kvpact_requests_total", "", "/v1/completions", "length"] == 2
    assert found["kvpact_requests_total", "invalid_value", "/v1/completions", ""] == 1
    assert found["kvpact_time_to_first_token_seconds_count",] == 2
    assert found["kvpact_inter_token_seconds_count",] == 4
    assert found["vllm:generation_tokens_total", "0", "fake"] == 6
    assert found["vllm:prompt_tokens_total", "0", "fake"] == 10
    assert found["vllm:request_success_total", "0", "length", "fake"] == 2
    assert found["vllm:num_requests_running", "0", "fake"] == 0


async def test_a_handoff_that_failed_is_counted_by_its_reason(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        cluster.prefill.faults.append(DataLoss("flipped", check="checksum"))
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        assert answer.status_code == 500
        found = await scraped(cluster)
    assert found["kvpact_handoffs_total", "data_loss"] == 1
    assert found["kvpact_requests_total", "data_loss", "/v1/completions", ""] == 1
    assert found["vllm:num_requests_running", "0", "fake"] == 0


async def test_a_handoff_that_is_lost_after_its_commit_is_counted(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        cluster.decode.fail_after = 2
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
        found = await scraped(cluster)
    assert found["kvpact_handoffs_total", "committed"] == 2
    assert found["kvpact_handoffs_total", "lost_after_commit"] == 1


async def test_a_stop_string_loses_no_handoff(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        cluster.script.say("one two three four five")
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "stop": "two"})
        found = await scraped(cluster)
    results = {key[1]: count for key, count in found.items() if key[0] == "kvpact_handoffs_total"}
    assert results == {"committed": 1}
    assert found["vllm:request_success_total", "0", "stop", "fake"] == 1


async def test_a_pair_in_quarantine_is_counted(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        cluster.prefill.faults.append(DataLoss("flipped", check="checksum"))
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        found = await scraped(cluster)
    assert found["kvpact_pair_quarantines_total", "data_loss"] == 1
    assert found["kvpact_pairs", "quarantined"] == 1


def account(metrics: Metrics, clock: ManualClock) -> Account:
    """One prompt of 3 tokens."""
    return Account(metrics, clock, endpoint="/v1/completions", prompt_tokens=3, max_output_tokens=9)


def test_first_tokens_that_come_together_are_all_counted() -> None:
    metrics, clock = Metrics("m"), ManualClock()
    with account(metrics, clock) as one:
        clock.advance(2.0)
        one.take(3)
        clock.advance(1.0)
        one.take(2)
        one.finish(FinishReason.LENGTH)
    found = samples(metrics.exposition(pairs=[], loads=[]).decode())
    assert found["vllm:generation_tokens_total", "0", "m"] == 5
    assert found["kvpact_time_to_first_token_seconds_sum",] == 2.0
    assert found["kvpact_inter_token_seconds_count",] == 2


def test_a_prompt_that_was_cancelled_is_no_success() -> None:
    metrics, clock = Metrics("m"), ManualClock()
    with account(metrics, clock) as one:
        one.take(3)
    found = samples(metrics.exposition(pairs=[], loads=[]).decode())
    assert found["kvpact_requests_total", "", "/v1/completions", "cancelled"] == 1
    assert [key for key in found if key[0] == "vllm:request_success_total"] == []
    assert found["kvpact_request_seconds_count",] == 0
    assert found["vllm:num_requests_running", "0", "m"] == 0


def test_pools_and_pairs_are_those_of_the_moment() -> None:
    metrics = Metrics("m")
    busy = make_load(free=16, waiting=3)
    metrics.exposition(pairs=["accept"], loads=[(Role.DECODE, "old", make_load())])
    found = samples(
        metrics.exposition(pairs=["reject", "pending"], loads=[(Role.DECODE, "d", busy)]).decode()
    )
    assert ("kvpact_pairs", "accept") not in found
    assert (found["kvpact_pairs", "reject"], found["kvpact_pairs", "pending"]) == (1, 1)
    assert ("kvpact_blocks", "decode", "free", "old") not in found
    assert found["kvpact_blocks", "decode", "used", "d"] == 48
    assert found["vllm:kv_cache_usage_perc", "0", "m"] == 0.75
    assert found["vllm:num_requests_waiting", "0", "m"] == 3


def counted(queries: int, hits: int) -> WorkerCounters:
    return WorkerCounters(prefix_query_tokens=queries, prefix_hit_tokens=hits)


def test_held_blocks_are_told_by_what_holds_them_and_none_of_an_idle_worker() -> None:
    metrics = Metrics("m")
    counts = BlockCounts(free=59, total=64, held=(("handoff", 2), ("sequence", 4)), cached=7)
    busy = dataclasses.replace(make_load(), blocks=counts)
    found = samples(metrics.exposition(pairs=[], loads=[(Role.DECODE, "d", busy)]).decode())
    assert found["kvpact_blocks_held", "handoff", "decode", "d"] == 2
    assert found["kvpact_blocks_held", "sequence", "decode", "d"] == 4
    assert found["kvpact_blocks_cached", "decode", "d"] == 7
    idle = dataclasses.replace(make_load(), blocks=BlockCounts(free=64, total=64, cached=7))
    found = samples(metrics.exposition(pairs=[], loads=[(Role.DECODE, "d", idle)]).decode())
    held = {key: value for key, value in found.items() if key[0] == "kvpact_blocks_held"}
    assert len(held) == 3
    assert set(held.values()) == {0}
    assert found["kvpact_blocks", "decode", "free", "d"] == 64


def test_prefix_tokens_add_up_over_workers_and_their_lives() -> None:
    metrics = Metrics("m")
    told = [
        [(Role.PREFILL, "p", counted(100, 32)), (Role.DECODE, "d", counted(80, 64))],
        [(Role.PREFILL, "p", counted(150, 48))],
        [(Role.PREFILL, "p", counted(10, 0))],
    ]
    for counters in told:
        text = metrics.exposition(pairs=[], loads=[], counters=counters)
    found = samples(text.decode())
    assert found["kvpact_prefix_tokens_total", "hit", "prefill"] == 48
    assert found["kvpact_prefix_tokens_total", "miss", "prefill"] == 160 - 48
    assert found["kvpact_prefix_tokens_total", "hit", "decode"] == 64
    assert found["vllm:prefix_cache_queries_total", "0", "m"] == 160
    assert found["vllm:prefix_cache_hits_total", "0", "m"] == 48


async def test_witness_checks_and_lossy_errors_are_counted(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            cluster.prefill.faults.append(DataLoss("a lie", check="witness"))
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        found = await scraped(cluster)
    assert found["kvpact_witness_checks_total", "passed"] == 1
    assert found["kvpact_witness_checks_total", "failed"] == 1
    assert found["kvpact_handoff_max_abs_error_count",] == 0
    metrics = Metrics("m")
    metrics.handoff_committed(payload_bytes=1, handoff_s=0.1, exposed_s=0.1, max_abs_error=0.02)
    found = samples(metrics.exposition(pairs=[], loads=[]).decode())
    assert found["kvpact_handoff_max_abs_error_sum",] == 0.02


async def test_probes_of_pairs_are_counted(tmp_path: Path) -> None:
    def one_fails(cluster: FakeCluster) -> None:
        cluster.prefill.canaries = [
            CanaryOutcome(passed=True, max_abs_error=1e-6, tolerance=1e-4),
            CanaryOutcome(passed=False, max_abs_error=0.5, tolerance=1e-4, finding="logits off by 0.5"),
        ]

    async with fake_cluster(make_text_folder(tmp_path), decode=2, prepare=one_fails) as cluster:
        await cluster.coordinator.wait_paired()
        found = await scraped(cluster)
    assert found["kvpact_canary_total", "failed"] == 1
    assert found["kvpact_canary_total", "passed"] == 1
