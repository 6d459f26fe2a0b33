"""One request ends exactly once, whatever its workers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coordinator.fleet import SETTLING_S
from coordinator.generation import Answer
from kvpact.errors import BadRequest, DataLoss, Exhausted, Fenced, KvpactError, Unavailable, UnknownHandoff
from kvpact.types import FinishReason, Sampling, VerdictWord
from tests.coordinator_fakes import (
    EOS,
    FakeCluster,
    FakeDecode,
    fake_cluster,
    make_life,
    make_load,
    make_text_folder,
    make_verdict,
)
from tests.factories import make_contract

REPLY = list(range(10, 60))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    """One worker of each role."""
    async with fake_cluster(make_text_folder(tmp_path)) as running:
        yield running


async def ask(cluster: FakeCluster, max_tokens: int) -> Answer:
    """One chat through the whole coordinator, without HTTP."""
    return await cluster.coordinator.chat("hi", max_tokens=max_tokens)


def releases(cluster: FakeCluster) -> list[set[bytes]]:
    """Handoff ids that each worker was told to release."""
    return [{handoff for handoff, _ in worker.released} for worker in [*cluster.prefills, *cluster.decodes]]


async def test_tokens_come_in_order_and_a_clean_end_releases_nothing(cluster: FakeCluster) -> None:
    answer = await ask(cluster, 5)
    assert answer.token_ids == tuple(REPLY[:5])
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.handoff_bytes, answer.handoff_s) == (1000, 0.01)
    assert releases(cluster) == [set(), set()]


async def test_prefill_and_decode_are_told_the_same_request(cluster: FakeCluster) -> None:
    await ask(cluster, 5)
    [prefill], [decode] = cluster.prefill.requests, cluster.decode.requests
    assert prefill.handoff_id == decode.handoff_id
    assert len(prefill.handoff_id) == 16
    assert list(decode.token_ids) == [*prefill.token_ids, REPLY[0]]
    assert prefill.table_length_tokens == len(prefill.token_ids) + 5
    assert prefill.sampling == decode.sampling
    assert (list(prefill.sampling.stop_token_ids), prefill.sampling.ignore_eos) == ([], False)
    assert prefill.decode_endpoint == cluster.decode.endpoint


async def test_the_table_length_ends_at_the_context(cluster: FakeCluster) -> None:
    cluster.script.reply = list(range(10, 250))
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
    [request] = cluster.prefill.requests
    assert request.table_length_tokens == 128
    assert answer["usage"]["completion_tokens"] == 128 - len(request.token_ids)


async def test_the_context_is_the_smallest_that_a_side_serves(tmp_path: Path) -> None:
    def shorten(cluster: FakeCluster) -> None:
        cluster.decode.contract = make_contract(context_tokens=64)

    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=shorten) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 64
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.status_code == 200
        [request] = cluster.prefill.requests
        assert request.table_length_tokens == 64
        for body in ({"prompt": "x" * 64}, {"prompt": [5] * 64}, {"prompt": "x", "max_tokens": 64}):
            refusal = (await http.post("/v1/completions", json=body)).json()["error"]
            assert refusal["code"] == "context_length_exceeded"
            assert "64 tokens" in refusal["message"]
        with pytest.raises(BadRequest, match="64 tokens"):
            await ask(cluster, 64)


async def test_one_token_needs_no_handoff(cluster: FakeCluster) -> None:
    answer = await ask(cluster, 1)
    assert (answer.token_ids, answer.finish_reason) == ((REPLY[0],), FinishReason.LENGTH)
    assert answer.handoff_bytes is None
    assert not cluster.prefill.requests[0].HasField("decode")
    assert cluster.decode.requests == []


async def test_one_token_is_not_computed_by_a_worker_whose_pair_is_refused(tmp_path: Path) -> None:
    def refuse(cluster: FakeCluster) -> None:
        cluster.prefill.verdicts = lambda decode: make_verdict(VerdictWord.REJECT, fields=["inv_freq"])

    async with (
        fake_cluster(make_text_folder(tmp_path), prepare=refuse) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        assert (await http.get("/ready")).status_code == 503
        answers = [
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": tokens})
            for tokens in (1, 2)
        ]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert answers[0].json() == answers[1].json()
        assert cluster.prefill.requests == []


async def test_two_tokens_are_two_tokens(cluster: FakeCluster) -> None:
    assert (await ask(cluster, 2)).token_ids == tuple(REPLY[:2])


async def test_a_first_token_that_ends_the_text_asks_no_decode_worker(cluster: FakeCluster) -> None:
    cluster.script.reply = [EOS]
    answer = await ask(cluster, 5)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((EOS,), "", FinishReason.STOP)
    assert cluster.decode.requests == []
    assert releases(cluster) == [set(), set()]


@pytest.mark.parametrize(
    "fault",
    [
        Unavailable("draining"),
        Fenced("another life", expected="a", found="b"),
        UnknownHandoff("expired", handoff_id=b"h" * 16),
    ],
)
async def test_a_failure_before_the_first_token_is_tried_once_more_under_a_new_id(
    cluster: FakeCluster, fault: KvpactError
) -> None:
    cluster.prefill.faults.append(fault)
    assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
    await cluster.coordinator.stop()
    first, second = (request.handoff_id for request in cluster.prefill.requests)
    assert first != second
    assert releases(cluster) == [{first}, {first}]


async def test_a_second_failure_without_a_token_is_the_users(cluster: FakeCluster) -> None:
    cluster.prefill.faults += [Unavailable("first"), Unavailable("second")]
    with pytest.raises(Unavailable, match="second"):
        await ask(cluster, 4)
    await cluster.coordinator.stop()
    ids = {request.handoff_id for request in cluster.prefill.requests}
    assert len(ids) == 2
    assert releases(cluster) == [ids, ids]


@pytest.mark.parametrize(
    "fault", [BadRequest("token 999 is out of range"), Exhausted("full", retry_after_s=2)]
)
async def test_a_failure_of_the_request_itself_is_not_tried_again(
    cluster: FakeCluster, fault: KvpactError
) -> None:
    cluster.prefill.faults.append(fault)
    with pytest.raises(type(fault)):
        await ask(cluster, 4)
    await cluster.coordinator.stop()
    assert len(cluster.prefill.requests) == 1
    assert releases(cluster) == [{cluster.prefill.requests[0].handoff_id}] * 2


async def test_a_full_decode_worker_is_asked_once_and_then_another(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=3) as cluster:
        cluster.prefill.faults.append(Exhausted("full", retry_after_s=2))
        assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
        first, second = (request.decode.worker for request in cluster.prefill.requests)
        assert first != second
        assert cluster.prefill.connects == 3, "a full worker is no broken one"


async def test_two_full_decode_workers_are_the_users(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=3) as cluster:
        cluster.prefill.faults += [Exhausted("full", retry_after_s=2), Exhausted("full too", retry_after_s=3)]
        with pytest.raises(Exhausted, match="full too"):
            await ask(cluster, 4)
        assert len(cluster.prefill.requests) == 2


async def test_a_lost_handoff_takes_the_pair_from_nobody_else(cluster: FakeCluster) -> None:
    cluster.prefill.faults.append(UnknownHandoff("expired", handoff_id=b"h" * 16))
    assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
    assert cluster.prefill.connects == 1


async def test_corrupt_bytes_put_the_pair_in_quarantine(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        cluster.prefill.faults.append(DataLoss("chunk 3", check="checksum"))
        for _ in range(4):
            assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
        bad, *good = (request.decode.worker for request in cluster.prefill.requests)
        assert bad not in good
        assert cluster.prefill.connects == 2, "it isn't paired anew at once"


async def test_a_quarantine_of_the_only_pair_turns_requests_away_at_once(cluster: FakeCluster) -> None:
    cluster.clock.advance(SETTLING_S)
    for worker in (cluster.prefill, cluster.decode):
        await worker.beat(cluster.grpc_endpoint)
    cluster.prefill.faults.append(DataLoss("chunk 3", check="checksum"))
    with pytest.raises(DataLoss):
        await ask(cluster, 4)
    with pytest.raises(Unavailable, match="in quarantine: chunk 3"):
        await ask(cluster, 4)
    assert len(cluster.prefill.requests) == 1


async def test_corrupt_bytes_are_tried_on_another_pair_and_never_on_the_same(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        cluster.prefill.faults.append(DataLoss("chunk 3", check="checksum"))
        assert (await ask(cluster, 4)).token_ids == tuple(REPLY[:4])
        first, second = (request.decode.worker for request in cluster.prefill.requests)
        assert first != second


async def test_corrupt_bytes_on_the_only_pair_fail_at_once(cluster: FakeCluster) -> None:
    cluster.prefill.faults.append(DataLoss("chunk 3", check="checksum"))
    with pytest.raises(DataLoss, match="chunk 3"):
        await ask(cluster, 4)
    assert len(cluster.prefill.requests) == 1


async def test_a_decode_worker_that_dies_after_some_tokens_costs_and_repeats_none(
    cluster: FakeCluster,
) -> None:
    cluster.decode.fail_after = 2
    answer = await ask(cluster, 10)
    assert answer.token_ids == tuple(REPLY[:10])
    first, second = cluster.prefill.requests
    assert list(second.token_ids) == [*first.token_ids, *REPLY[:3]]
    assert second.sampling == first.sampling, "limits count from the original prompt"
    assert second.table_length_tokens == first.table_length_tokens
    await cluster.coordinator.stop()
    assert releases(cluster) == [{first.handoff_id}, {first.handoff_id}]


async def test_progress_earns_another_try(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        for worker in cluster.decodes:
            worker.fail_after = 1
        assert (await ask(cluster, 10)).token_ids == tuple(REPLY[:10])
        assert len(cluster.prefill.requests) == 3


async def test_a_resume_with_one_token_left_hands_nothing_over(cluster: FakeCluster) -> None:
    cluster.decode.fail_after = 3
    assert (await ask(cluster, 5)).token_ids == tuple(REPLY[:5])
    assert not cluster.prefill.requests[1].HasField("decode")


async def test_a_resume_with_one_token_left_stays_with_the_contract_that_began(tmp_path: Path) -> None:
    def differ(cluster: FakeCluster) -> None:
        cluster.prefills[1].contract = make_contract(context_tokens=1024)
        cluster.prefills[1].load = make_load(running=9)
        cluster.prefills[2].load = make_load(running=10)
        cluster.decode.fail_after = 3

    async with fake_cluster(make_text_folder(tmp_path), prefill=3, prepare=differ) as cluster:
        cluster.decode.hold_after = 1
        asking = asyncio.ensure_future(ask(cluster, 5))
        await cluster.decode.holding.wait()
        cluster.prefill.load = make_load(running=20)
        await cluster.prefill.beat(cluster.grpc_endpoint)
        cluster.decode.go_on.set()
        assert (await asking).token_ids == tuple(REPLY[:5])
        assert [len(worker.requests) for worker in cluster.prefills] == [1, 0, 1]


async def test_a_request_goes_on_with_the_next_life_of_its_worker(cluster: FakeCluster) -> None:
    cluster.decode.hold_after = 2
    asking = asyncio.ensure_future(ask(cluster, 8))
    await cluster.decode.holding.wait()
    reborn = FakeDecode(cluster.script, make_life("decode-0", 2))
    await reborn.start()
    await reborn.register(cluster.grpc_endpoint)
    assert (await asking).token_ids == tuple(REPLY[:8])
    assert len(reborn.requests) == 1
    await cluster.coordinator.stop()
    await reborn.die()


async def test_a_killed_worker_is_waited_for_until_it_is_back(cluster: FakeCluster) -> None:
    await cluster.decode.die()
    asking = asyncio.ensure_future(ask(cluster, 4))
    await cluster.prefill.released_now.wait()
    reborn = FakeDecode(cluster.script, make_life("decode-0", 2))
    await reborn.start()
    await reborn.register(cluster.grpc_endpoint)
    assert (await asking).token_ids == tuple(REPLY[:4])
    await cluster.coordinator.stop()
    await reborn.die()


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_a_prefill_stream_that_never_ends_is_cancelled_and_holds_no_answer_up(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr("coordinator.attempt.PREFILL_END_S", 0.0, raising=False)
    cluster.prefill.linger = True
    async with asyncio.timeout(5):
        assert (await ask(cluster, max_tokens)).token_ids == tuple(REPLY[:max_tokens])
        await cluster.prefill.cancelled.wait()
    assert releases(cluster) == [set(), set()]


async def test_cancelling_reaches_both_workers(cluster: FakeCluster) -> None:
    cluster.decode.hold_after = 2
    asking = asyncio.ensure_future(ask(cluster, 8))
    await cluster.decode.holding.wait()
    asking.cancel()
    await cluster.decode.cancelled.wait()
    await cluster.coordinator.stop()
    ids = {cluster.prefill.requests[0].handoff_id}
    assert releases(cluster) == [ids, ids]


async def test_cancelling_during_prefill_reaches_both_workers(cluster: FakeCluster) -> None:
    cluster.prefill.hold = True
    asking = asyncio.ensure_future(ask(cluster, 8))
    await cluster.prefill.holding.wait()
    asking.cancel()
    await cluster.prefill.cancelled.wait()
    await cluster.coordinator.stop()
    ids = {cluster.prefill.requests[0].handoff_id}
    assert releases(cluster) == [ids, ids]


async def test_a_refused_pair_is_never_asked(tmp_path: Path) -> None:
    def refuse_first(cluster: FakeCluster) -> None:
        reject = make_verdict(VerdictWord.REJECT, fields=["inv_freq"])
        cluster.prefill.verdicts = lambda decode: reject if decode == "decode-0" else make_verdict()

    async with fake_cluster(make_text_folder(tmp_path), decode=2, prepare=refuse_first) as cluster:
        for _ in range(3):
            await ask(cluster, 3)
        assert cluster.decodes[0].requests == []
        assert len(cluster.decodes[1].requests) == 3


async def test_requests_spread_over_decode_workers(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        for worker in cluster.decodes:
            worker.hold_after = 1
        asking = [asyncio.ensure_future(ask(cluster, 4)) for _ in range(2)]
        for worker in cluster.decodes:
            await worker.holding.wait()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_too_many_requests_at_once_are_turned_away(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.lifecycle.MAX_RUNNING", 1)
    cluster.decode.hold_after = 1
    asking = asyncio.ensure_future(ask(cluster, 4))
    await cluster.decode.holding.wait()
    with pytest.raises(Exhausted, match="1 requests run already"):
        await ask(cluster, 4)
    cluster.decode.go_on.set()
    assert (await asking).token_ids == tuple(REPLY[:4])


async def test_a_worker_that_gives_a_sequence_up_is_a_failure_and_not_an_end(cluster: FakeCluster) -> None:
    output = cluster.script.output
    given_up = False

    def give_up_once(index: int, sampling: Sampling) -> tuple[int, FinishReason | None]:
        nonlocal given_up
        token, reason = output(index, sampling)
        if index == 2 and not given_up:
            given_up = True
            return token, FinishReason.CANCELLED
        return token, reason

    cluster.decode.outputs = give_up_once
    assert (await ask(cluster, 5)).token_ids == tuple(REPLY[:5])
    assert cluster.prefill.connects == 1, "the pair stays in use"
