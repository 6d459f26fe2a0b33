"""The central test: a prompt through two engines and a handoff equals transformers' own generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpact.cli.pair import InProcessPair, PairToken
from kvpact.engine.engine import Engine
from kvpact.types import Exactness, PlanOp, Sampling, VerdictWord
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

MODELS = {
    "llama": {"model_type": "llama", "rope": "default"},
    "llama3-scaled": {"model_type": "llama", "rope": "llama3"},
    "qwen3": {"model_type": "qwen3", "rope": "default"},
}
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50, 63, 64, 65, 127, 511, 2048)
TOKENS = 64
CACHES = [
    {"key_state": key_state, "axis_order": axis_order, "block_size": block_size}
    for key_state, axis_order, block_size in itertools.product(("raw", "rotated"), ("NHD", "HND"), (16, 24))
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    writer = identified_engine(folder, blocks=256, prefill_chunk_tokens=96)
    reader = identified_engine(folder, blocks=256)
    for engine in (writer, reader):
        engine.start()
    yield writer, reader
    for engine in (writer, reader):
        engine.close()


async def collect(pair: InProcessPair, prompt: tuple[int, ...], tokens: int) -> list[PairToken]:
    sampling = Sampling(max_output_tokens=tokens, ignore_eos=True)
    return [token async for token in pair.generate(prompt, sampling, want_logits=True)]


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_and_logits_equal_transformers(
    folder: Path, engines: tuple[Engine, Engine], length: int
) -> None:
    writer, reader = engines
    prompt = prompt_of(length)
    expected = golden(folder, prompt, TOKENS)
    before = reader.counters().computed_output_tokens
    async with InProcessPair(writer, reader) as pair:
        tokens = await collect(pair, prompt, TOKENS)
    assert tuple(token.token_id for token in tokens) == expected.token_ids
    decoded_NV = torch.stack([token.logits for token in tokens[1:]])
    assert float((decoded_NV - expected.logits_NV[1:]).abs().max()) <= 1e-4
    assert reader.counters().computed_output_tokens - before == TOKENS - 1
    for engine in engines:
        assert engine.pool.counts().free == engine.pool.counts().total


@pytest.mark.parametrize("writer_cache", CACHES, ids=lambda cache: "-".join(map(str, cache.values())))
async def test_every_cache_form_converts_to_every_other(llama: Path, writer_cache: dict[str, Any]) -> None:
    prompts = [prompt_of(length) for length in (5, 33, 48)]
    expected = [golden(llama, prompt, 16).token_ids for prompt in prompts]
    writer = identified_engine(llama, blocks=16, **writer_cache)
    writer.start()
    for reader_cache in CACHES:
        reader = identified_engine(llama, blocks=16, **reader_cache)
        reader.start()
        async with InProcessPair(writer, reader) as pair:
            verdict = await pair.connect()
            found = [await collect(pair, prompt, 16) for prompt in prompts]
        reader.close()
        differing = {key for key in writer_cache if writer_cache[key] != reader_cache[key]}
        assert {difference.field for difference in verdict.differences} == differing
        assert verdict.word is (VerdictWord.CONVERT if differing else VerdictWord.ACCEPT)
        assert [step.exactness for step in verdict.plan] == [
            Exactness.ROUNDING if step.op in (PlanOp.ROTATE, PlanOp.UNROTATE) else Exactness.BIT_EXACT
            for step in verdict.plan
        ]
        assert [tuple(token.token_id for token in tokens) for tokens in found] == expected
    writer.close()
