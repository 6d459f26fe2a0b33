"""Short prompts go to a decode worker alone: who gets them, what is counted, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.generation import Answer
from kvpact.errors import BadRequest, Exhausted, Fenced, KvpactError, Unavailable
from kvpact.types import FinishReason, Sampling, VerdictWord
from tests.coordinator_fakes import (
    EOS,
    FakeCluster,
    FakeDecode,
    fake_cluster,
    make_life,
    make_text_folder,
    make_verdict,
)
from tests.factories import make_contract

REPLY = list(range(10, 60))
CHAT_TOKENS = 21
"""Of the chat that `ask` sends."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    """One prefill worker and two decode workers that compute prompts of up to 40 tokens themselves."""
    async with fake_cluster(make_text_folder(tmp_path), decode=2, local_prefill_max_tokens=40) as running:
        yield running


async def ask(cluster: FakeCluster, max_tokens: int) -> Answer:
    """One chat through the whole coordinator, without HTTP."""
    return await cluster.coordinator.chat("hi", max_tokens=max_tokens)


async def complete(cluster: FakeCluster, **body: Any) -> httpx.Response:
    """One completion over HTTP."""
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        return await http.post("/v1/completions", json=body)


async def counted(cluster: FakeCluster, name: str) -> float:
    """A counter's value, summed over its labels; 0 where it was never counted."""
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def local_requests(cluster: FakeCluster) -> list[Any]:
    """Prompts that decode workers were to compute themselves, those of the first worker first."""
    return [request for worker in cluster.decodes for request in worker.local_requests]


async def released_nothing(cluster: FakeCluster) -> bool:
    """Whether nobody was told to release a handoff."""
    await cluster.coordinator.stop()
    return not any(worker.released for worker in [*cluster.prefills, *cluster.decodes])


@pytest.mark.parametrize(("length", "is_local"), [(1, True), (7, True), (8, False)])
async def test_the_longest_local_prompt_has_just_so_many_tokens(
    tmp_path: Path, length: int, is_local: bool
) -> None:
    async with fake_cluster(make_text_folder(tmp_path), local_prefill_max_tokens=7) as cluster:
        answer = await complete(cluster, prompt=[5] * length, max_tokens=4)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (len(local_requests(cluster)), len(cluster.prefill.requests)) == (is_local, not is_local)


async def test_by_default_every_prompt_is_handed_over(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        assert (await ask(cluster, 4)).handoff_bytes == 1000
        assert local_requests(cluster) == []
        assert await counted(cluster, "kvpact_local_prefills_total") == 0
        assert await counted(cluster, "kvpact_handoffs_total") == 1


async def test_nothing_is_handed_over_and_the_counters_say_so(cluster: FakeCluster) -> None:
    answer = await ask(cluster, 5)
    assert (answer.token_ids, answer.finish_reason) == (tuple(REPLY[:5]), FinishReason.LENGTH)
    assert (answer.handoff_bytes, answer.handoff_s, answer.max_abs_error) == (None, None, None)
    assert answer.ttft_s >= 0
    assert cluster.prefill.requests == []
    assert await counted(cluster, "kvpact_local_prefills_total") == 1
    assert await counted(cluster, "kvpact_handoffs_total") == 0
    assert await released_nothing(cluster)


async def test_the_decode_worker_is_told_all_of_the_request(cluster: FakeCluster) -> None:
    await ask(cluster, 5)
    [request] = local_requests(cluster)
    assert len(request.token_ids) == CHAT_TOKENS
    assert request.table_length_tokens == CHAT_TOKENS + 5
    assert request.sampling.original_prompt_tokens == CHAT_TOKENS
    assert request.sampling.max_output_tokens == 5
    assert request.decode.worker in {"decode-0", "decode-1"}
    assert request.request_id


async def test_a_stop_token_ends_the_text(cluster: FakeCluster) -> None:
    cluster.script.reply = [30, EOS]
    answer = await ask(cluster, 5)
    assert (answer.token_ids, answer.finish_reason) == ((30, EOS), FinishReason.STOP)


async def test_one_token_stays_with_a_prefill_worker_alone(cluster: FakeCluster) -> None:
    assert (await ask(cluster, 1)).token_ids == (REPLY[0],)
    assert local_requests(cluster) == []
    assert await counted(cluster, "kvpact_local_prefills_total") == 0


async def test_a_refused_pair_refuses_short_prompts_as_long_ones(tmp_path: Path) -> None:
    def refuse(cluster: FakeCluster) -> None:
        cluster.prefill.verdicts = lambda decode: make_verdict(VerdictWord.REJECT, fields=["inv_freq"])

    folder = make_text_folder(tmp_path)
    async with fake_cluster(folder, prepare=refuse, local_prefill_max_tokens=8) as cluster:
        answers = [await complete(cluster, prompt=[5] * length, max_tokens=4) for length in (8, 9)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert answers[0].json() == answers[1].json()
        assert local_requests(cluster) == []


@pytest.mark.parametrize("fault", [Unavailable("draining"), Fenced("another life", expected="a", found="b")])
async def test_a_failure_before_the_first_token_is_tried_once_more(
    cluster: FakeCluster, fault: KvpactError
) -> None:
    for worker in cluster.decodes:
        worker.faults.append(fault)
    with pytest.raises(type(fault)):
        await ask(cluster, 4)
    assert len(local_requests(cluster)) == 2
    assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
    assert await counted(cluster, "kvpact_local_prefills_total") == 1
    assert await counted(cluster, "kvpact_handoffs_total") == 0
    assert await released_nothing(cluster)


async def test_a_worker_that_is_gone_is_paired_anew(cluster: FakeCluster) -> None:
    cluster.decode.faults.append(Unavailable("reset"))
    while not cluster.decode.local_requests:
        assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
    assert cluster.prefill.connects == 3, "one for each pair, and one more for the pair that failed"


async def test_a_failure_after_tokens_goes_on_without_one_repeated_or_lost(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.fail_after = 3
    assert (await ask(cluster, 10)).token_ids == tuple(REPLY[:10])
    requests = sorted(local_requests(cluster), key=lambda request: len(request.token_ids))
    prompt = list(requests[0].token_ids)
    assert [list(request.token_ids) for request in requests] == [
        prompt,
        prompt + REPLY[:3],
        prompt + REPLY[:6],
    ]
    assert {request.table_length_tokens for request in requests} == {CHAT_TOKENS + 10}
    assert {request.sampling.original_prompt_tokens for request in requests} == {CHAT_TOKENS}
    assert cluster.prefill.requests == []
    assert await released_nothing(cluster)


@pytest.mark.parametrize(("limit", "local_tries"), [(CHAT_TOKENS + 2, 1), (CHAT_TOKENS + 3, 2)])
async def test_a_text_that_outgrew_the_limit_goes_on_by_a_handoff(
    tmp_path: Path, limit: int, local_tries: int
) -> None:
    async with fake_cluster(make_text_folder(tmp_path), local_prefill_max_tokens=limit) as cluster:
        cluster.decode.fail_after = 3
        answer = await ask(cluster, 10)
        assert answer.token_ids == tuple(REPLY[:10])
        assert answer.handoff_bytes == (1000 if local_tries == 1 else None)
        assert len(local_requests(cluster)) == local_tries
        assert len(cluster.prefill.requests) == 2 - local_tries
        if local_tries == 1:
            [resumed] = cluster.prefill.requests
            assert list(resumed.token_ids)[CHAT_TOKENS:] == REPLY[:3]
            assert resumed.table_length_tokens == CHAT_TOKENS + 10


async def test_the_last_token_of_a_text_that_began_without_a_handoff(tmp_path: Path) -> None:
    def differ(cluster: FakeCluster) -> None:
        cluster.decode.contract = make_contract(block_size=32)  # as the two sides of a pair that converts

    folder = make_text_folder(tmp_path)
    async with fake_cluster(folder, prepare=differ, local_prefill_max_tokens=40) as cluster:
        cluster.decode.fail_after = 3
        assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
        [last] = cluster.prefill.requests
        assert not last.HasField("decode")


async def test_a_full_decode_worker_is_asked_once_and_then_another(cluster: FakeCluster) -> None:
    cluster.decode.faults.append(Exhausted("full", retry_after_s=2))
    while not cluster.decode.local_requests:
        assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
    assert cluster.prefill.connects == 2, "a full worker is no broken one"


async def test_two_full_decode_workers_are_the_users(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.faults.append(Exhausted("full", retry_after_s=2))
    with pytest.raises(Exhausted, match="full"):
        await ask(cluster, 4)
    assert [len(worker.local_requests) for worker in cluster.decodes] == [1, 1]


async def test_a_request_that_cannot_be_served_is_not_tried_again(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.faults.append(BadRequest("token 999 is out of range"))
    with pytest.raises(BadRequest):
        await ask(cluster, 4)
    assert len(local_requests(cluster)) == 1


async def test_cancelling_reaches_the_decode_worker(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.hold_after = 2
    asking = asyncio.ensure_future(ask(cluster, 8))
    holding = [asyncio.ensure_future(worker.holding.wait()) for worker in cluster.decodes]
    await asyncio.wait(holding, return_when=asyncio.FIRST_COMPLETED)
    [busy] = [worker for worker in cluster.decodes if worker.holding.is_set()]
    asking.cancel()
    await busy.cancelled.wait()
    for task in holding:
        task.cancel()
    assert await released_nothing(cluster)
    assert await asyncio.gather(asking, return_exceptions=True)


async def test_a_sequence_that_its_worker_gives_up_is_no_end(cluster: FakeCluster) -> None:
    output = cluster.script.output
    given_up: list[int] = []

    def give_up_once(index: int, sampling: Sampling) -> tuple[int, FinishReason | None]:
        token, reason = output(index, sampling)
        if index == 2 and not given_up:
            given_up.append(index)
            return token, FinishReason.CANCELLED
        return token, reason

    for worker in cluster.decodes:
        worker.outputs = give_up_once
    assert (await ask(cluster, 5)).token_ids == tuple(REPLY[:5])
    assert cluster.prefill.connects == 2, "both pairs stay in use"


async def test_a_killed_worker_is_waited_for_until_it_is_back(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), local_prefill_max_tokens=40) as cluster:
        cluster.decode.hold_after = 2
        asking = asyncio.ensure_future(ask(cluster, 8))
        await cluster.decode.holding.wait()
        await cluster.decode.die()
        reborn = FakeDecode(cluster.script, make_life("decode-0", 2))
        await reborn.start()
        await reborn.register(cluster.grpc_endpoint)
        assert (await asking).token_ids == tuple(REPLY[:8])
        [resumed] = reborn.local_requests
        assert list(resumed.token_ids)[CHAT_TOKENS:] == REPLY[:2]
        await cluster.coordinator.stop()
        await reborn.die()


async def test_requests_spread_over_decode_workers(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.hold_after = 1
    asking = [asyncio.ensure_future(ask(cluster, 4)) for _ in range(2)]
    for worker in cluster.decodes:
        await worker.holding.wait()
        worker.go_on.set()
    assert {answer.token_ids for answer in await asyncio.gather(*asking)} == {tuple(REPLY[:4])}
    assert [len(worker.local_requests) for worker in cluster.decodes] == [1, 1]
