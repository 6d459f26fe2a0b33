"""Prompts of which all, or a prefix, lies in a cache already: what is computed, sent and written again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpact.cli.pair import InProcessPair
from kvpact.clock import new_handoff_id
from kvpact.engine.engine import Engine
from kvpact.engine.requests import ChunkComputed, SequenceRequest, TokenComputed
from kvpact.engine.stream import stream
from kvpact.handoff.jobs import FirstToken
from kvpact.types import BlockId, Sampling
from tests.fakes import identified_engine, load_engine, make_request, make_tiny_model, prompt_of, run_by_hand
from tests.references import golden

LENGTHS = (15, 16, 17, 32)
BLOCKS = {15: 1, 16: 1, 17: 2, 32: 2}
TOKENS = 8
SAMPLING = Sampling(max_output_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """Writer and reader with nothing cached."""
    pair = identified_engine(folder, blocks=32), identified_engine(folder, blocks=32)
    for engine in pair:
        engine.start()
    yield pair
    for engine in pair:
        engine.close()
        assert engine.pool.counts().free == 32


async def handed_over(pair: InProcessPair, reader: Engine, prompt: tuple[int, ...]) -> list[int]:
    """First token and those decoded; looks at the blocks of the committed handoff in between."""
    job = pair.prefill_job(new_handoff_id(), prompt, SAMPLING)
    events = [event async for event in pair.prefiller.prefill(job)]
    first = events[-1]
    assert isinstance(first, FirstToken)
    assert reader.pool.held() == {"handoff": BLOCKS[len(prompt)]}
    order = pair.decode_job(job.handoff_id, (*prompt, first.token_id), len(prompt), SAMPLING)
    return [first.token_id, *[part.token_ids[0] async for part in pair.decoder.decode(order)]]


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_full_prompt_whose_first_token_is_shipped_takes_its_own_blocks_and_no_more(
    folder: Path, engines: tuple[Engine, Engine], length: int
) -> None:
    writer, reader = engines
    async with InProcessPair(writer, reader) as pair:
        await pair.connect()
        found = await handed_over(pair, reader, prompt_of(length))
    assert tuple(found) == golden(folder, prompt_of(length), TOKENS).token_ids
    assert writer.counters().computed_prompt_tokens == length
    assert reader.counters().computed_prompt_tokens == 0
    assert reader.counters().computed_output_tokens == TOKENS - 1


def filled_by(writer: Engine, engine: Engine, prompt: tuple[int, ...]) -> tuple[BlockId, ...]:
    """Blocks of `engine` with the keys and values of the whole prompt, as `writer` made them."""
    (made,) = run_by_hand(writer, make_request(prompt, 1, stop_after_first=True, hold_blocks=True))
    (chunk,) = [event for event in made.events if isinstance(event, ChunkComputed)]
    blocks = engine.pool.allocate(len(chunk.blocks), "sequence")
    for layer in range(engine.contract.layer_count()):
        for ours, theirs in zip(engine.cache.storage(layer), writer.cache.storage(layer), strict=True):
            ours[list(blocks)] = theirs[list(chunk.blocks)]
    return blocks


def bytes_of(engine: Engine, blocks: tuple[BlockId, ...]) -> list[tuple[bytes, bytes]]:
    layers = range(engine.contract.layer_count())
    read = [engine.cache.read_blocks(layer, torch.tensor(blocks)) for layer in layers]
    return [(bytes(keys), bytes(values)) for keys, values in read]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("key_state", ["rotated", "raw"])
def test_without_a_first_token_one_row_is_computed_again_and_no_key_is_written_twice(
    folder: Path, length: int, key_state: str
) -> None:
    prompt = prompt_of(length)
    engine = load_engine(folder, blocks=32, key_state=key_state)
    writer_form = load_engine(folder, key_state=key_state)
    assert writer_form.contract.layout == engine.contract.layout
    blocks = filled_by(writer_form, engine, prompt)
    assert len(blocks) == BLOCKS[length]
    before = bytes_of(engine, blocks)
    request = make_request(prompt, 1, blocks=blocks, computed_tokens=length, stop_after_first=True)
    (found,) = run_by_hand(engine, request)
    expected = golden(folder, prompt, 1)
    assert tuple(found.token_ids) == expected.token_ids
    assert float((found.logits - expected.logits_NV).abs().max()) <= 1e-4
    assert engine.counters().computed_prompt_tokens == 1
    assert bytes_of(engine, blocks) == before
    assert engine.pool.counts().free == 32


@pytest.mark.parametrize("length", LENGTHS)
def test_after_the_row_that_is_computed_again_decoding_goes_on_as_ever(folder: Path, length: int) -> None:
    prompt = prompt_of(length)
    engine = load_engine(folder, blocks=32)
    blocks = filled_by(load_engine(folder), engine, prompt)
    (found,) = run_by_hand(engine, make_request(prompt, TOKENS, blocks=blocks, computed_tokens=length))
    assert tuple(found.token_ids) == golden(folder, prompt, TOKENS).token_ids


@pytest.mark.parametrize("length", [16, 32])
def test_a_prompt_that_is_cached_as_a_whole_computes_one_row(folder: Path, length: int) -> None:
    prompt = prompt_of(length)
    engine = load_engine(folder, blocks=32)
    run_by_hand(engine, make_request(prompt, TOKENS))
    before = engine.counters()
    (found,) = run_by_hand(engine, make_request(prompt, TOKENS))
    after = engine.counters()
    expected = golden(folder, prompt, TOKENS)
    assert tuple(found.token_ids) == expected.token_ids
    assert float((found.logits - expected.logits_NV).abs().max()) <= 1e-4
    assert after.computed_prompt_tokens - before.computed_prompt_tokens == 1
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == length
    assert engine.pool.counts().free == 32


def test_a_row_that_is_written_a_second_time_would_show(folder: Path) -> None:
    """Control: with other keys in the cache the row that is computed again doesn't put them right."""
    prompt = prompt_of(32)
    engine = load_engine(folder, blocks=32)
    blocks = filled_by(load_engine(folder), engine, prompt)
    for layer in range(engine.contract.layer_count()):
        rows = engine.cache.rows(engine.cache.slots(blocks, 31, 32), 2)
        engine.cache.put(layer, rows, torch.full((1, 2, 16), 3.0), torch.full((1, 2, 16), 3.0))
    before = bytes_of(engine, blocks)
    request = make_request(prompt, 1, blocks=blocks, computed_tokens=32, stop_after_first=True)
    (found,) = run_by_hand(engine, request)
    assert bytes_of(engine, blocks) == before
    assert float((found.logits - golden(folder, prompt, 1).logits_NV).abs().max()) > 1e-2


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_prefix_held_on_both_sides_is_neither_computed_nor_sent_again(
    folder: Path, engines: tuple[Engine, Engine], length: int
) -> None:
    writer, reader = engines
    whole = (length - 1) // 16 * 16
    expected = golden(folder, prompt_of(length), TOKENS).token_ids
    async with InProcessPair(writer, reader) as pair:
        await pair.connect()
        for held in (0, whole, whole):
            computed, landed = writer.counters().computed_prompt_tokens, pair.receiver.counters()
            assert tuple(await handed_over(pair, reader, prompt_of(length))) == expected
            assert writer.counters().computed_prompt_tokens - computed == length - held
            assert pair.receiver.counters().prefix_hit_tokens - landed.prefix_hit_tokens == held
            blocks = BLOCKS[length] - held // 16
            token_bytes = 2 * 2 * 2 * 16 * 4
            sent = pair.receiver.counters().landed_bytes - landed.landed_bytes
            assert sent == blocks * 16 * token_bytes
    assert reader.pool.held() == {}


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_decode_worker_that_computed_the_prompt_itself_takes_only_the_rest(
    folder: Path, engines: tuple[Engine, Engine], length: int
) -> None:
    writer, reader = engines
    prompt = prompt_of(length)
    await own(reader, prompt)
    async with InProcessPair(writer, reader) as pair:
        await pair.connect()
        assert tuple(await handed_over(pair, reader, prompt)) == golden(folder, prompt, TOKENS).token_ids
        assert pair.receiver.counters().prefix_hit_tokens == (length - 1) // 16 * 16
        computed = reader.counters().computed_prompt_tokens
        assert await own(reader, prompt) == golden(folder, prompt, TOKENS).token_ids
    assert reader.counters().computed_prompt_tokens - computed == max(1, length % 16)


async def own(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What an engine answers by itself."""
    request = SequenceRequest(token_ids=prompt, sampling=SAMPLING, table_length=len(prompt) + TOKENS)
    events = [event async for event in stream(engine, request)]
    return tuple(event.token_id for event in events if isinstance(event, TokenComputed))
