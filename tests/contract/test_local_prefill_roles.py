"""A decode worker that computes a prompt itself, on real engines: same tokens and refusals, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_worker.service import add_decode_service
from kvpact.cli.pair import InProcessPair
from kvpact.clock import new_handoff_id, new_incarnation
from kvpact.engine.engine import Engine
from kvpact.errors import BadRequest, Exhausted, Fenced, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.jobs import FirstToken, GenerateJob
from kvpact.handoff.status import from_rpc_error
from kvpact.types import FinishReason, Sampling
from kvpact.v1 import decode_pb2, decode_pb2_grpc
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

TOKENS = 24
SAMPLING = Sampling(max_output_tokens=TOKENS, ignore_eos=True)
READER_BLOCK = 24
CHUNK = 16
LENGTHS = sorted({length for s in (CHUNK, READER_BLOCK) for length in (1, s - 1, s, s + 1, 3 * s + 2)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    writer = identified_engine(folder, blocks=64, prefill_chunk_tokens=CHUNK)
    reader = identified_engine(
        folder, blocks=64, prefill_chunk_tokens=CHUNK, key_state="raw", block_size=READER_BLOCK
    )
    for engine in (writer, reader):
        engine.start()
    yield writer, reader
    for engine in (writer, reader):
        engine.close()


@pytest.fixture
async def pair(engines: tuple[Engine, Engine]) -> AsyncIterator[InProcessPair]:
    """Every test leaves both pools full."""
    async with InProcessPair(*engines) as made:
        yield made
        await all_free(*engines)


async def all_free(*engines: Engine) -> None:
    """A sequence that ends during a forward gives its blocks back right after it."""
    async with asyncio.timeout(10):
        while any(e.pool.counts().free != e.pool.counts().total for e in engines):  # noqa: ASYNC110  the engine's thread frees them
            await asyncio.sleep(0)


def job_for(pair: InProcessPair, token_ids: tuple[int, ...], prompt_tokens: int | None = None) -> GenerateJob:
    """The order to go on with `token_ids`, of which the first `prompt_tokens` (all) are the prompt."""
    original = len(token_ids) if prompt_tokens is None else prompt_tokens
    return GenerateJob(
        decode=pair.decode_job(new_handoff_id(), (1,), 1, SAMPLING).decode,
        token_ids=token_ids,
        original_prompt_tokens=original,
        table_length=original + TOKENS,
        sampling=SAMPLING,
        request_id="r",
    )


async def alone(pair: InProcessPair, job: GenerateJob) -> tuple[int, ...]:
    return tuple([token async for tokens in pair.decoder.generate(job) for token in tokens.token_ids])


async def handed_over(pair: InProcessPair, token_ids: tuple[int, ...], prompt_tokens: int) -> tuple[int, ...]:
    """The rest of a text by a handoff of all its tokens so far."""
    job = dataclasses.replace(
        pair.prefill_job(new_handoff_id(), token_ids, SAMPLING),
        original_prompt_tokens=prompt_tokens,
        table_length=prompt_tokens + TOKENS,
    )
    first = [event async for event in pair.prefiller.prefill(job)][-1]
    assert isinstance(first, FirstToken)
    order = pair.decode_job(job.handoff_id, (*token_ids, first.token_id), prompt_tokens, SAMPLING)
    return (first.token_id, *[token.token_id async for token in pair.decoder.tokens(order)])


@pytest.mark.parametrize("length", LENGTHS)
async def test_alone_equals_handed_over_equals_transformers(
    folder: Path, engines: tuple[Engine, Engine], pair: InProcessPair, length: int
) -> None:
    prompt = prompt_of(length)
    expected = golden(folder, prompt, TOKENS).token_ids
    assert tuple([token.token_id async for token in pair.generate(prompt, SAMPLING)]) == expected
    before = engines[0].counters()
    handoffs = pair.receiver.counters()
    assert await alone(pair, job_for(pair, prompt)) == expected
    assert engines[0].counters() == before, "the prefill side computes nothing"
    assert pair.receiver.counters() == handoffs


@pytest.mark.parametrize("length", [1, READER_BLOCK - 1, READER_BLOCK, 3 * READER_BLOCK + 2])
@pytest.mark.parametrize("sent", [1, 5, TOKENS - 1])
async def test_a_text_goes_on_either_way_where_the_other_one_stopped(
    folder: Path, pair: InProcessPair, length: int, sent: int
) -> None:
    prompt = prompt_of(length, seed=2)
    expected = golden(folder, prompt, TOKENS).token_ids
    so_far = prompt + expected[:sent]
    assert await alone(pair, job_for(pair, so_far, length)) == expected[sent:]
    if sent < TOKENS - 1:  # a last token is never handed over
        assert await handed_over(pair, so_far, length) == expected[sent:]


async def test_another_table_gives_other_tokens(folder: Path) -> None:
    engine = identified_engine(folder, blocks=8, override={"rope_theta": 500.0})
    engine.start()
    prompt = prompt_of(40)
    async with InProcessPair(engine, engine) as pair:
        assert await alone(pair, job_for(pair, prompt)) != golden(folder, prompt, TOKENS).token_ids
    engine.close()


async def test_a_stop_token_ends_it_with_its_reason(folder: Path, pair: InProcessPair) -> None:
    expected = golden(folder, prompt_of(40), TOKENS).token_ids
    stop = next(token for token in expected[2:] if token not in expected[:2])
    sampling = Sampling(max_output_tokens=TOKENS, stop_token_ids=frozenset({stop}), ignore_eos=True)
    job = dataclasses.replace(job_for(pair, prompt_of(40)), sampling=sampling)
    tokens = [tokens async for tokens in pair.decoder.generate(job)]
    assert [each.token_ids[0] for each in tokens] == list(expected[: expected.index(stop) + 1])
    assert [each.finish_reason for each in tokens] == [None] * (len(tokens) - 1) + [FinishReason.STOP]


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_leaving_early_frees_every_block(engines: tuple[Engine, Engine], after: int) -> None:
    async with InProcessPair(*engines) as pair:
        async with contextlib.aclosing(pair.decoder.generate(job_for(pair, prompt_of(200)))) as tokens:
            if after == 0:
                starting = asyncio.ensure_future(anext(tokens))
                await asyncio.sleep(0)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            for _ in range(after):
                await anext(tokens)
        await all_free(*engines)
    assert engines[1].load_now() == (0, 0)


async def test_another_life_is_fenced(pair: InProcessPair) -> None:
    job = job_for(pair, prompt_of(5))
    older = dataclasses.replace(job.decode, incarnation=new_incarnation())
    with pytest.raises(Fenced, match="another life"):
        await anext(pair.decoder.generate(dataclasses.replace(job, decode=older)))


async def test_a_draining_worker_takes_no_prompt_and_ends_those_that_run(
    folder: Path, pair: InProcessPair
) -> None:
    job = job_for(pair, prompt_of(5))
    async with contextlib.aclosing(pair.decoder.generate(job)) as tokens:
        found = [(await anext(tokens)).token_ids[0]]
        pair.decoder.drain()
        with pytest.raises(Unavailable, match="draining"):
            await anext(pair.decoder.generate(job))
        found += [each.token_ids[0] async for each in tokens]
    assert tuple(found) == golden(folder, prompt_of(5), TOKENS).token_ids


Change = Callable[[GenerateJob], GenerateJob]


def changed(**fields: Any) -> Change:
    """An order with some fields set."""
    return lambda job: dataclasses.replace(job, **fields)


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("table_length_tokens is 4", changed(table_length=4)),
        ("table_length_tokens is 4097", changed(table_length=4097)),
        ("original_prompt_tokens is 6", changed(original_prompt_tokens=6)),
        ("original_prompt_tokens is 0", changed(original_prompt_tokens=0)),
        ("token id 99999", changed(token_ids=(5, 5, 5, 5, 99999))),
        ("token id -1", changed(token_ids=(5, 5, 5, 5, -1))),
        ("no room", changed(token_ids=(5,) * 4096, table_length=4096, original_prompt_tokens=4096)),
        ("no token is left", changed(sampling=Sampling(max_output_tokens=2), original_prompt_tokens=3)),
        ("can't fit in 64 blocks", changed(sampling=Sampling(max_output_tokens=3000))),
    ],
)
async def test_an_order_that_cannot_be_served_is_refused_before_any_compute(
    engines: tuple[Engine, Engine], pair: InProcessPair, says: str, change: Change
) -> None:
    job = job_for(pair, prompt_of(5))
    before = engines[1].counters()
    with pytest.raises(BadRequest, match=says):
        await anext(pair.decoder.generate(change(job)))
    assert engines[1].counters() == before
    await alone(pair, job)


async def test_a_full_worker_says_so_at_once_and_serves_when_there_is_room(
    engines: tuple[Engine, Engine], pair: InProcessPair
) -> None:
    pool = engines[1].pool
    taken = pool.allocate(pool.counts().free - 5, "test")
    job = job_for(pair, prompt_of(READER_BLOCK + 1))
    with pytest.raises(Exhausted, match="takes 2 blocks; 5 of 64 are free, 4 stay so") as full:
        await anext(pair.decoder.generate(job))
    assert full.value.retry_after_s > 0
    pool.free(taken, "test")
    assert len(await alone(pair, job)) == TOKENS


@contextlib.asynccontextmanager
async def served(pair: InProcessPair) -> AsyncIterator[decode_pb2_grpc.DecodeServiceAsyncStub]:
    """The pair's decode side behind gRPC."""
    server = grpc.aio.server()
    add_decode_service(server, pair.receiver, pair.decoder)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield decode_pb2_grpc.DecodeServiceStub(channel)
    await server.stop(5)


async def test_over_grpc_the_tokens_are_the_same(folder: Path, pair: InProcessPair) -> None:
    prompt = prompt_of(50)
    async with served(pair) as stub:
        call = stub.Generate(codec.encode_generate_job(job_for(pair, prompt)), timeout=60)
        tokens = [codec.decode_decoded_tokens(message) async for message in call]
    found = tuple(token for each in tokens for token in each.token_ids)
    assert found == golden(folder, prompt, TOKENS).token_ids
    assert tokens[-1].finish_reason is FinishReason.LENGTH


async def test_over_grpc_a_client_that_leaves_frees_every_block(
    engines: tuple[Engine, Engine], pair: InProcessPair
) -> None:
    long = Sampling(max_output_tokens=1000, ignore_eos=True)
    job = dataclasses.replace(job_for(pair, prompt_of(50)), sampling=long, table_length=1050)
    async with served(pair) as stub:
        call = stub.Generate(codec.encode_generate_job(job))
        await call.read()
        call.cancel()
        await all_free(*engines)
    assert engines[1].load_now() == (0, 0)


@pytest.mark.parametrize("lacking", ["decode", "token_ids", "sampling", "table_length_tokens"])
async def test_over_grpc_a_malformed_order_is_the_callers_fault(pair: InProcessPair, lacking: str) -> None:
    message: decode_pb2.GenerateRequest = codec.encode_generate_job(job_for(pair, prompt_of(5)))
    message.ClearField(lacking)  # type: ignore[arg-type]
    async with served(pair) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(message, timeout=10).read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    refusal = from_rpc_error(failed.value, peer="decode")
    assert isinstance(refusal, BadRequest)
    assert refusal.param == lacking
