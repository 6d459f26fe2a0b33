"""The real checkpoint through two engines and a handoff: the tokens and logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kvpact.cli.pair import InProcessPair
from kvpact.engine.engine import Engine
from kvpact.engine.weights import resolve_model
from kvpact.types import Sampling
from tests.fakes import identified_engine
from tests.references import golden

TOKENS = 64
TEXTS = (
    "Q",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a small town by the sea, and in it lived a clockmaker. " * 9,
)
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 511, 1024, 2048)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    made = tuple(identified_engine(folder, blocks=160, threads=2) for _ in range(2))
    for engine in made:
        engine.start()
    writer, reader = made
    yield writer, reader
    for engine in made:
        engine.close()


async def check_equal(folder: Path, engines: tuple[Engine, Engine], prompt: tuple[int, ...]) -> None:
    expected = golden(folder, prompt, TOKENS)
    sampling = Sampling(max_output_tokens=TOKENS, ignore_eos=True)
    before = engines[1].counters().computed_output_tokens
    async with InProcessPair(*engines) as pair:
        tokens = [token async for token in pair.generate(prompt, sampling, want_logits=True)]
    assert tuple(token.token_id for token in tokens) == expected.token_ids
    decoded_NV = torch.stack([token.logits for token in tokens[1:]])
    assert float((decoded_NV - expected.logits_NV[1:]).abs().max()) <= 1e-4
    assert engines[1].counters().computed_output_tokens - before == TOKENS - 1
    for engine in engines:
        assert engine.pool.counts().free == engine.pool.counts().total


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_five_prompts_equal_transformers(
    folder: Path, engines: tuple[Engine, Engine], text: str
) -> None:
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    await check_equal(folder, engines, tuple(prompt))


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", LENGTHS)
async def test_twenty_lengths_equal_transformers(
    folder: Path, engines: tuple[Engine, Engine], length: int
) -> None:
    text = " ".join(f"Chapter {number}: the clockmaker counts to {number * 7}." for number in range(400))
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:length]
    assert len(prompt) == length
    await check_equal(folder, engines, tuple(prompt))
