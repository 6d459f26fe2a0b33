"""Prefill and decode roles over real engines: every way out frees every block on both sides and says why."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvpact.cli.pair import InProcessPair
from kvpact.clock import new_handoff_id, new_incarnation
from kvpact.engine.engine import Engine
from kvpact.errors import BadRequest, ContractRefused, Fenced, Unavailable, UnknownHandoff
from kvpact.handoff.jobs import Committed, DecodeJob, FirstToken, PrefillJob, Reserved
from kvpact.types import FinishReason, HandoffId, Sampling, VerdictWord
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

SAMPLING = Sampling(max_output_tokens=24, ignore_eos=True)
PROMPT = prompt_of(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    writer = identified_engine(folder, blocks=64, prefill_chunk_tokens=16)
    reader = identified_engine(folder, blocks=64, key_state="raw", block_size=24)
    for engine in (writer, reader):
        engine.start()
    yield writer, reader
    for engine in (writer, reader):
        engine.close()


@pytest.fixture
async def pair(engines: tuple[Engine, Engine]) -> AsyncIterator[InProcessPair]:
    """Every test leaves both pools full and the receiver empty."""
    async with InProcessPair(*engines) as made:
        yield made
        await nothing_held(made)
        await pools_full(engines)


async def nothing_held(pair: InProcessPair) -> None:
    """A landing that still runs when its handoff ends gives its blocks back right after it."""
    async with asyncio.timeout(10):
        while pair.receiver.held():  # noqa: ASYNC110  nothing tells when a landing ended but the receiver's count
            await asyncio.sleep(0)


async def pools_full(engines: tuple[Engine, Engine]) -> None:
    """A sequence that ends during a forward gives its blocks back right after it."""
    async with asyncio.timeout(10):
        while any(engine.pool.held() for engine in engines):  # noqa: ASYNC110  the engine's thread frees them
            await asyncio.sleep(0)


def prefill_job(pair: InProcessPair, sampling: Sampling = SAMPLING) -> PrefillJob:
    return pair.prefill_job(new_handoff_id(), PROMPT, sampling)


async def committed(pair: InProcessPair) -> tuple[HandoffId, int]:
    """A handoff that waits for Decode, and its first token."""
    job = prefill_job(pair)
    events = [event async for event in pair.prefiller.prefill(job)]
    assert [type(event) for event in events] == [Reserved, Committed, FirstToken]
    last = events[-1]
    assert isinstance(last, FirstToken)
    return job.handoff_id, last.token_id


def decode_job(pair: InProcessPair, handoff_id: HandoffId, first_token: int) -> DecodeJob:
    return pair.decode_job(handoff_id, (*PROMPT, first_token), len(PROMPT), SAMPLING)


async def test_eight_at_once_equal_transformers(folder: Path, pair: InProcessPair) -> None:
    prompts = [prompt_of(30 + index, seed=5) for index in range(8)]

    async def run(prompt: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([token.token_id async for token in pair.generate(prompt, SAMPLING)])

    found = await asyncio.gather(*map(run, prompts))
    assert found == [golden(folder, prompt, 24).token_ids for prompt in prompts]


async def test_a_first_token_that_stops_hands_nothing_over(folder: Path, pair: InProcessPair) -> None:
    first = golden(folder, PROMPT, 1).token_ids[0]
    job = prefill_job(
        pair, Sampling(max_output_tokens=24, stop_token_ids=frozenset({first}), ignore_eos=True)
    )
    events = [event async for event in pair.prefiller.prefill(job)]
    assert events[1:] == [FirstToken(token_id=first, finish_reason=FinishReason.STOP)]
    assert pair.receiver.counters().committed == 0


async def test_a_stop_token_ends_decoding_with_it(folder: Path, pair: InProcessPair) -> None:
    expected = golden(folder, PROMPT, 24).token_ids
    stop = next(token for token in expected[2:] if token not in expected[:2])
    sampling = Sampling(max_output_tokens=24, stop_token_ids=frozenset({stop}), ignore_eos=True)
    tokens = [token async for token in pair.generate(PROMPT, sampling)]
    assert tuple(token.token_id for token in tokens) == expected[: expected.index(stop) + 1]
    assert tokens[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("after", [1, 2])
async def test_leaving_prefill_early_releases_the_reservation(pair: InProcessPair, after: int) -> None:
    job = prefill_job(pair)
    async with contextlib.aclosing(pair.prefiller.prefill(job)) as events:
        for _ in range(after):
            await anext(events)
    assert pair.receiver.counters().committed == after - 1
    if after == 2:
        await pair.receiver.release(job.handoff_id, "nobody decodes it")


async def test_giving_a_computation_up_ends_it_as_unavailable(pair: InProcessPair) -> None:
    job = prefill_job(pair)

    async def prefill() -> None:
        async for event in pair.prefiller.prefill(job):
            assert isinstance(event, Reserved)
            asyncio.get_running_loop().call_soon(pair.prefiller.give_up, job.handoff_id)

    with pytest.raises(Unavailable, match="was released"):
        await prefill()


async def test_release_while_an_order_waits_for_its_turn_ends_it(pair: InProcessPair) -> None:
    job = prefill_job(pair)
    pair.prefiller._slots = asyncio.Semaphore(0)
    waiting = asyncio.ensure_future(anext(pair.prefiller.prefill(job)))
    await asyncio.sleep(0)
    assert pair.prefiller.give_up(job.handoff_id)
    with pytest.raises(Unavailable, match="was released"):
        await waiting
    assert pair.prefiller.jobs() == 0


@pytest.mark.parametrize("ticks", range(12))
async def test_an_order_that_is_cancelled_at_any_moment_gives_its_turn_back(
    pair: InProcessPair, ticks: int
) -> None:
    await pair.connect()
    pair.prefiller._slots = asyncio.Semaphore(1)
    events = pair.prefiller.prefill(prefill_job(pair))
    leaving = asyncio.ensure_future(anext(events))
    for _ in range(ticks):
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await events.aclose()
    async with asyncio.timeout(10):
        handoff_id, _ = await committed(pair)
    await pair.receiver.release(handoff_id, "nobody decodes it")


async def test_an_order_that_comes_after_its_release_is_fenced(pair: InProcessPair) -> None:
    job = prefill_job(pair)
    assert not pair.prefiller.give_up(job.handoff_id)
    with pytest.raises(Fenced, match="can't be computed"):
        await anext(pair.prefiller.prefill(job))


async def test_the_same_order_twice_is_fenced_and_the_first_goes_on(pair: InProcessPair) -> None:
    job = prefill_job(pair)
    async with contextlib.aclosing(pair.prefiller.prefill(job)) as first:
        await anext(first)
        with pytest.raises(Fenced, match="can't be computed"):
            await anext(pair.prefiller.prefill(job))
        assert pair.prefiller.jobs() == 1
        assert isinstance(await anext(first), Committed)
    await pair.receiver.release(job.handoff_id, "nobody decodes it")


async def test_a_stale_order_for_an_older_life_leaves_the_newer_connection_alone(pair: InProcessPair) -> None:
    await pair.connect()
    stale = prefill_job(pair)
    assert stale.decode is not None
    older = dataclasses.replace(stale.decode.life, incarnation=new_incarnation())
    stale = dataclasses.replace(stale, decode=dataclasses.replace(stale.decode, life=older))
    with pytest.raises(Fenced, match="another life"):
        await anext(pair.prefiller.prefill(stale))
    handoff_id, _ = await committed(pair)
    await pair.receiver.release(handoff_id, "nobody decodes it")


async def test_another_life_of_the_prefill_worker_is_fenced(pair: InProcessPair) -> None:
    job = prefill_job(pair)
    other = dataclasses.replace(job.prefill, incarnation=new_incarnation())
    with pytest.raises(Fenced, match="another life"):
        await anext(pair.prefiller.prefill(dataclasses.replace(job, prefill=other)))


async def test_a_draining_prefill_worker_takes_no_prompt(engines: tuple[Engine, Engine]) -> None:
    async with InProcessPair(*engines) as pair:
        assert pair.prefiller.drain() == 0
        with pytest.raises(Unavailable, match="draining"):
            await anext(pair.prefiller.prefill(prefill_job(pair)))


async def test_a_draining_decode_worker_reserves_nothing(engines: tuple[Engine, Engine]) -> None:
    async with InProcessPair(*engines) as pair:
        pair.receiver.drain()
        before = engines[0].counters().computed_prompt_tokens
        with pytest.raises(Unavailable, match="draining"):
            await anext(pair.prefiller.prefill(prefill_job(pair)))
        assert engines[0].counters().computed_prompt_tokens == before


async def test_a_refused_cache_costs_no_compute(folder: Path, engines: tuple[Engine, Engine]) -> None:
    writer, _ = engines
    reader = identified_engine(folder, blocks=8, override={"rope_theta": 500.0})
    before = writer.counters().computed_prompt_tokens
    async with InProcessPair(writer, reader) as pair:
        with pytest.raises(ContractRefused, match="inv_freq"):
            await anext(pair.generate(PROMPT, SAMPLING))
    assert writer.counters().computed_prompt_tokens == before
    assert reader.pool.counts().free == 8
    reader.close()


async def test_output_that_could_never_fit_is_refused_before_any_compute(
    folder: Path, engines: tuple[Engine, Engine]
) -> None:
    writer, _ = engines
    reader = identified_engine(folder, blocks=6)
    before = writer.counters().computed_prompt_tokens
    async with InProcessPair(writer, reader, checked=False) as pair:
        sampling = Sampling(max_output_tokens=500, ignore_eos=True)
        with pytest.raises(BadRequest, match="can't fit in 6 blocks"):
            await anext(pair.generate(PROMPT, sampling))
    assert writer.counters().computed_prompt_tokens == before
    assert reader.pool.counts().free == 6
    reader.close()


async def test_blocks_larger_than_a_message_are_refused_at_pairing(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "wide", head_dim=256, hidden_size=1024, kv_heads=4)
    writer = identified_engine(folder, blocks=2, block_size=1024)
    reader = identified_engine(folder, blocks=8)
    async with InProcessPair(writer, reader, checked=False) as pair:
        verdict = await pair.connect()
    assert verdict.word is VerdictWord.REJECT
    assert "block_size" in {difference.field for difference in verdict.differences}
    for engine in (writer, reader):
        engine.close()


async def test_a_handoff_is_decoded_once(folder: Path, pair: InProcessPair) -> None:
    handoff_id, first = await committed(pair)
    job = decode_job(pair, handoff_id, first)
    tokens = [token.token_ids[0] async for token in pair.decoder.decode(job)]
    assert (first, *tokens) == golden(folder, PROMPT, 24).token_ids
    with pytest.raises((Fenced, UnknownHandoff)):
        await anext(pair.decoder.decode(job))


async def test_tokens_of_another_prompt_are_refused_and_the_handoff_stays(pair: InProcessPair) -> None:
    handoff_id, first = await committed(pair)
    with pytest.raises(Fenced, match="token_ids"):
        await anext(pair.decoder.decode(decode_job(pair, handoff_id, (first + 1) % 200)))
    assert pair.receiver.held() == 1
    await pair.receiver.release(handoff_id, "the test ends")


async def test_leaving_decode_early_frees_its_blocks(pair: InProcessPair) -> None:
    handoff_id, first = await committed(pair)
    async with contextlib.aclosing(pair.decoder.decode(decode_job(pair, handoff_id, first))) as tokens:
        await anext(tokens)


async def test_release_while_decoding_ends_it_as_unavailable(pair: InProcessPair) -> None:
    handoff_id, first = await committed(pair)
    long = dataclasses.replace(
        decode_job(pair, handoff_id, first), sampling=Sampling(max_output_tokens=1000, ignore_eos=True)
    )

    async def decode() -> None:
        async for _ in pair.decoder.decode(long):
            pair.decoder.give_up(handoff_id)

    with pytest.raises(Unavailable, match="was released"):
        await decode()
