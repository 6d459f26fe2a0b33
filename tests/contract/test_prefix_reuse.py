"""A prefix that is taken from a cache gives what computing and sending it anew gives, or isn't taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpact.cli.pair import InProcessPair, PairToken
from kvpact.contract.content_identity import ContentId, NameMaker, own_passage
from kvpact.contract.tables import table_at
from kvpact.engine.engine import Engine
from kvpact.engine.prefix import PrefixCache
from kvpact.engine.requests import SequenceFailed
from kvpact.errors import DataLoss
from kvpact.handoff.capture import Capture
from kvpact.kvcache.cached_block import CachedBlock
from kvpact.types import Sampling
from prefill_worker.computation import Computation
from tests.fakes import identified_engine, load_engine, make_request, make_tiny_model, prompt_of, run_by_hand
from tests.references import golden
from tests.unit.test_content_identity import two_tables

TOKENS = 6
SAMPLING = Sampling(max_output_tokens=TOKENS, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "sliding": {
        "model_type": "qwen3",
        "layers": 3,
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 to 16": ({}, {}),
    "16 to 32": ({}, {"block_size": 32}),
    "32 to 16": ({"block_size": 32}, {}),
    "16 to 24": ({}, {"block_size": 24}),
    "raw to rotated": ({"key_state": "raw"}, {"axis_order": "HND"}),
}
STEPS = {"16 to 16": 16, "16 to 32": 32, "32 to 16": 32, "16 to 24": 48, "raw to rotated": 16}
BASE = prompt_of(150)
"""Its beginnings are prefixes of each other; each prompt below goes on in its own way."""
PROMPTS = (BASE[:97], (*BASE[:97], *prompt_of(20, seed=3)), (*BASE[:64], *prompt_of(40, seed=4)), BASE[:96])


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@contextlib.asynccontextmanager
async def joined(
    folder: Path, writer: dict[str, Any], reader: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[InProcessPair, Engine, Engine]]:
    """A pair of new engines, both pools full at the end."""
    engines = [identified_engine(folder, blocks=64, **form) for form in (writer, reader)]
    for engine in engines:
        engine.start()
    async with InProcessPair(*engines, **options) as pair:
        await pair.connect()
        yield pair, engines[0], engines[1]
    for engine in engines:
        engine.close()
        assert engine.pool.held() == {}


async def collect(pair: InProcessPair, prompt: tuple[int, ...]) -> list[PairToken]:
    return [token async for token in pair.generate(prompt, SAMPLING, want_logits=True)]


def ids(tokens: list[PairToken]) -> tuple[int, ...]:
    return tuple(token.token_id for token in tokens)


@pytest.mark.parametrize("form", FORMS)
async def test_with_and_without_a_cached_prefix_tokens_and_logits_equal_transformers(
    folder: Path, form: str
) -> None:
    writer_form, reader_form = FORMS[form]
    hits = []
    async with joined(folder, writer_form, reader_form) as (pair, _, _):
        for prompt in PROMPTS:
            before = pair.receiver.counters().prefix_hit_tokens
            tokens = await collect(pair, prompt)
            hits.append(pair.receiver.counters().prefix_hit_tokens - before)
            expected = golden(folder, prompt, TOKENS)
            assert ids(tokens) == expected.token_ids
            decoded_NV = torch.stack([token.logits for token in tokens[1:]])
            assert float((decoded_NV - expected.logits_NV[1:]).abs().max()) <= 1e-4
    step = STEPS[form]
    assert hits[0] == 0
    if "sliding" not in str(folder):
        assert hits == [0, *(shared // step * step for shared in (97, 64, 95))]


async def test_a_window_takes_a_prefix_only_where_all_that_it_still_sees_is_held(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of the prompt of 97 the layers with a window of 20 got blocks from 64 on alone.

    A prompt of 70 sees back to 51, so it can take 48 tokens, not 64; one of 84 sees back to 65.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("sliding"), **MODELS["sliding"])
    async with joined(folder, {}, {}) as (pair, _, _):
        hits = []
        for prompt in (BASE[:97], BASE[:117], BASE[:70], BASE[:84]):
            before = pair.receiver.counters().prefix_hit_tokens
            assert ids(await collect(pair, prompt)) == golden(folder, prompt, TOKENS).token_ids
            hits.append(pair.receiver.counters().prefix_hit_tokens - before)
    assert hits == [0, 96, 48, 80]


@pytest.mark.parametrize("form", FORMS)
async def test_the_writer_s_own_cached_blocks_are_shown_by_the_rows_they_keep(llama: Path, form: str) -> None:
    writer_form, reader_form = FORMS[form]
    captures: list[Capture] = []
    size = writer_form.get("block_size", 16)
    async with joined(llama, writer_form, reader_form, on_capture=captures.append) as (pair, writer, reader):
        await collect(pair, BASE[:97])
        reader.forget_prefixes()
        computed = writer.counters().computed_prompt_tokens
        tokens = await collect(pair, BASE[:97])
        assert writer.counters().computed_prompt_tokens - computed == 1
    assert ids(tokens) == golden(llama, BASE[:97], TOKENS).token_ids
    commit = captures[-1].commit()
    assert commit is not None
    assert commit.first_computed_tokens == 96
    cached = {witness.position // size for witness in commit.witnesses if witness.position < 96}
    assert cached == set(range(96 // size)), "as many rows as blocks: each block is shown"


def kept_bytes(engine: Engine) -> dict[bytes, list[bytes]]:
    """What lies in each block that is known by its name."""
    layers = range(engine.contract.layer_count())
    entries = tuple(engine.pool._kept.values())
    return {
        entry.name: [
            bytes(part)
            for layer in layers
            for part in engine.cache.read_blocks(layer, torch.tensor([entry.block]))
        ]
        for entry in entries
    }


@pytest.mark.parametrize("form", FORMS)
async def test_nobody_writes_into_a_block_that_others_may_share(folder: Path, form: str) -> None:
    writer_form, reader_form = FORMS[form]
    async with joined(folder, writer_form, reader_form) as (pair, *engines):
        await collect(pair, PROMPTS[0])
        before = [kept_bytes(engine) for engine in engines]
        assert all(before)
        for prompt in (*PROMPTS[1:], PROMPTS[0]):
            await collect(pair, prompt)
        for known, engine in zip(before, engines, strict=True):
            after = kept_bytes(engine)
            assert {name: after[name] for name in known if name in after} == known


def spoil(engine: Engine, entry: CachedBlock, *, keys: bool) -> None:
    """Another prompt's bytes in one cached block, in every layer."""
    for layer in range(engine.contract.layer_count()):
        storage = engine.cache.storage(layer)[0 if keys else 1]
        storage[entry.block] = torch.randn(storage[entry.block].shape)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("block", range(6))
async def test_a_stale_cached_block_of_the_writer_is_caught_and_forgotten(
    llama: Path, block: int, keys: bool
) -> None:
    async with joined(llama, {}, {}) as (pair, writer, reader):
        await collect(pair, BASE[:97])
        reader.forget_prefixes()
        entries = {entry.rows[0].place.token // 16: entry for entry in writer.pool._kept.values()}  # type: ignore[attr-defined, index]
        spoil(writer, entries[block], keys=keys)
        with pytest.raises(DataLoss, match="witness of layer"):
            await collect(pair, BASE[:97])
        await pair.connect()
        assert ids(await collect(pair, BASE[:97])) == golden(llama, BASE[:97], TOKENS).token_ids


async def test_a_row_that_a_cached_block_keeps_and_isn_t_shown_is_asked_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(llama, {}, {}) as (pair, _, reader):
        await collect(pair, BASE[:97])
        reader.forget_prefixes()
        shown = Computation._shown

        def without_cached(computation: Computation) -> Any:
            found = shown(computation)
            return replace(found, rows=tuple(row for row in found.rows if row.position >= 96))

        monkeypatch.setattr(Computation, "_shown", without_cached)
        with pytest.raises(DataLoss, match="rows where"):
            await collect(pair, BASE[:97])


async def test_what_a_doubtful_writer_landed_is_never_reused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(llama, {}, {}) as (pair, writer, reader):
        await collect(pair, BASE[:97])
        assert reader.pool.counts().cached > 0
        writer.forget_prefixes()
        read = writer.cache.read_blocks
        monkeypatch.setattr(
            writer.cache,
            "read_blocks",
            lambda layer, blocks: tuple(memoryview(bytes(len(part))) for part in read(layer, blocks)),
        )
        with pytest.raises(DataLoss, match="witness"):
            await collect(pair, (*BASE[:64], *prompt_of(40, seed=9)))
        assert reader.pool.counts().cached == 0


def test_equal_tokens_at_shifted_positions_share_nothing(llama: Path) -> None:
    engine = load_engine(llama, blocks=32)
    run_by_hand(engine, make_request(BASE[:40], 1))
    shifted = tuple(range(100, 140))
    before = engine.counters()
    (found,) = run_by_hand(engine, make_request(BASE[:40], 1, positions=shifted))
    assert engine.counters().prefix_hit_tokens == before.prefix_hit_tokens
    assert engine.counters().computed_prompt_tokens - before.computed_prompt_tokens == 40
    again = engine.counters().prefix_hit_tokens
    (repeated,) = run_by_hand(engine, make_request(BASE[:40], 1, positions=shifted))
    assert engine.counters().prefix_hit_tokens - again == 32
    assert float((found.logits - repeated.logits).abs().max()) <= 1e-4


class Blind(NameMaker):
    """Names blocks by their tokens alone."""

    def names(
        self, token_ids: Sequence[int], positions: Iterable[int], table_length: int
    ) -> tuple[ContentId, ...]:
        return super().names(token_ids, range(len(token_ids)), table_length)


@pytest.mark.parametrize("blind", [False, True])
def test_only_names_that_know_positions_keep_a_shifted_prompt_right(llama: Path, blind: bool) -> None:
    shifted = tuple(range(100, 140))
    (right,) = run_by_hand(load_engine(llama, blocks=32), make_request(BASE[:40], 1, positions=shifted))
    engine = load_engine(llama, blocks=32)
    assert engine._prefixes is not None
    if blind:
        engine._prefixes._makes = Blind(engine.contract, own_passage(engine.contract), 16)
    run_by_hand(engine, make_request(BASE[:40], 1))
    (found,) = run_by_hand(engine, make_request(BASE[:40], 1, positions=shifted))
    gap = float((found.logits - right.logits).abs().max())
    assert gap > 1e-2 if blind else gap <= 1e-4


def test_two_tables_of_one_policy_are_two_contents_and_one_table_is_one(llama: Path) -> None:
    engine = load_engine(llama, blocks=32)
    contract = two_tables(engine.contract)
    names = PrefixCache(contract, engine.pool)._makes.names
    short, long = (table_at(contract.layer_groups[0].rotary, length=n, context_tokens=4096) for n in (64, 65))
    assert short != long
    assert names(BASE[:32], range(32), 40) == names(BASE[:32], range(32), 64)
    assert not set(names(BASE[:32], range(32), 64)) & set(names(BASE[:32], range(32), 65))


async def test_two_requests_side_by_side_share_a_prefix_while_one_is_cancelled(llama: Path) -> None:
    async with joined(llama, {}, {}) as (pair, _, reader):
        await collect(pair, BASE[:97])
        long = Sampling(max_output_tokens=60, ignore_eos=True)
        leaving = pair.generate(BASE[:100], long)
        staying = asyncio.ensure_future(collect(pair, (*BASE[:96], *prompt_of(9, seed=5))))
        for _ in range(3):
            await anext(leaving)
        await leaving.aclose()
        expected = golden(llama, (*BASE[:96], *prompt_of(9, seed=5)), TOKENS)
        assert ids(await staying) == expected.token_ids
        assert ids(await collect(pair, BASE[:97])) == golden(llama, BASE[:97], TOKENS).token_ids
        assert pair.receiver.counters().prefix_hit_tokens == 96 * 3
        assert reader.pool.held() == {}


async def test_under_pressure_cached_blocks_give_way_and_every_answer_stays_right(llama: Path) -> None:
    prompts = [(*BASE[: 32 + 16 * (n % 3)], *prompt_of(10 + n, seed=6)) for n in range(9)]
    engines = identified_engine(llama, blocks=14), identified_engine(llama, blocks=14)
    for engine in engines:
        engine.start()
    async with InProcessPair(*engines) as pair:
        for prompt in prompts * 2:
            assert ids(await collect(pair, prompt)) == golden(llama, prompt, TOKENS).token_ids
        counters = pair.receiver.counters()
        assert 0 < counters.prefix_hit_tokens < counters.prefix_query_tokens
    for engine in engines:
        engine.close()
        assert engine.pool.counts().free == 14


def test_a_preempted_sequence_takes_its_own_blocks_up_again(llama: Path) -> None:
    engine = load_engine(llama, blocks=6)
    prompts = [prompt_of(40, seed=7), prompt_of(30, seed=8)]
    found = run_by_hand(engine, *(make_request(prompt, 16) for prompt in prompts))
    for prompt, each in zip(prompts, found, strict=True):
        assert tuple(each.token_ids) == golden(llama, prompt, 16).token_ids
    assert engine.pool.counts().free == 6


def test_a_cached_block_that_gives_no_numbers_fails_one_prompt_and_not_every_later_one(llama: Path) -> None:
    engine = load_engine(llama)
    (before,) = run_by_hand(engine, make_request(BASE[:40], 3))
    for layer in range(engine.contract.layer_count()):
        for entry in engine.pool._kept.values():
            engine.cache.storage(layer)[1][entry.block] = float("nan")
    (failed,) = run_by_hand(engine, make_request(BASE[:40], 3))
    assert isinstance(failed.events[-1], SequenceFailed)
    assert engine.pool.counts().cached == 0
    (after,) = run_by_hand(engine, make_request(BASE[:40], 3))
    assert after.token_ids == before.token_ids == list(golden(llama, BASE[:40], 3).token_ids)


def test_a_resumed_block_that_its_last_token_alone_completes_is_left_to_others_too(llama: Path) -> None:
    """The second prompt gives way at 32 tokens; of these its next chunk computes 31, and a decode row one."""
    engine = load_engine(llama, blocks=5, prefill_chunk_tokens=31)
    prompts = [prompt_of(31, seed=7), prompt_of(15, seed=8)]
    found = run_by_hand(engine, *(make_request(prompt, 30) for prompt in prompts))
    for prompt, each in zip(prompts, found, strict=True):
        assert tuple(each.token_ids) == golden(llama, prompt, 30).token_ids
    assert engine.pool.counts().cached == 2 + 1, "the second's blocks, and the first's of its prompt"


async def test_handed_over_sequences_that_give_way_come_back_right(llama: Path) -> None:
    long = Sampling(max_output_tokens=60, ignore_eos=True)
    prompts = [(*BASE[:32], *prompt_of(8, seed=seed)) for seed in (11, 12)]
    engines = identified_engine(llama, blocks=64), identified_engine(llama, blocks=10)
    for engine in engines:
        engine.start()
    async with InProcessPair(*engines) as pair:
        await pair.connect()
        texts = [pair.generate(prompt, long) for prompt in prompts]
        firsts = [(await anext(text)).token_id for text in texts]

        async def rest(index: int) -> tuple[int, ...]:
            return (firsts[index], *[token.token_id async for token in texts[index]])

        found = await asyncio.gather(rest(0), rest(1))
        assert pair.receiver.counters().prefix_hit_tokens == 32
    assert found == [golden(llama, prompt, 60).token_ids for prompt in prompts]
    assert engines[1].counters().computed_prompt_tokens > 0, "nobody gave way"
    for engine in engines:
        engine.close()
        assert engine.pool.held() == {}


async def test_with_the_setting_off_nothing_is_shared(llama: Path) -> None:
    off = {"prefix_cache": False}
    async with joined(llama, off, off) as (pair, writer, reader):
        for _ in range(2):
            assert ids(await collect(pair, BASE[:97])) == golden(llama, BASE[:97], TOKENS).token_ids
        assert writer.counters().computed_prompt_tokens == 2 * 97
        assert pair.receiver.counters().prefix_query_tokens == 0
        assert [engine.pool.counts().cached for engine in (writer, reader)] == [0, 0]


@pytest.mark.parametrize("off", [0, 1], ids=["writer", "reader"])
async def test_one_side_may_have_it_off(llama: Path, off: int) -> None:
    forms = [{"prefix_cache": side != off} for side in range(2)]
    async with joined(llama, *forms) as (pair, writer, _):
        for _ in range(2):
            assert ids(await collect(pair, BASE[:97])) == golden(llama, BASE[:97], TOKENS).token_ids
        assert pair.receiver.counters().prefix_hit_tokens == (96 if off == 0 else 0)
        assert writer.counters().computed_prompt_tokens == (2 * 97 if off == 0 else 97 + 1)


async def test_probes_neither_take_nor_leave_cached_blocks(llama: Path) -> None:
    async with joined(llama, {}, {}) as (pair, writer, reader):
        assert pair.canary is not None
        assert pair.canary.passed
        assert [engine.pool.counts().cached for engine in (writer, reader)] == [0, 0]
