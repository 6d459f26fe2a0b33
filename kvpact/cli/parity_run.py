"""Parity of one model: decoding from a cache, with and without a handoff, against a full forward.

The reference is the model's own eager forward without a cache over the prompt and one more token. Prefill
alone can't show a doubled rotation, so the row of the token that is decoded from the cache is compared: keys,
values, attention logits and attention outputs of every layer, then the final logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import torch

from kvpact.cli.pair import InProcessPair
from kvpact.cli.parity import OUTPUT_TOKENS
from kvpact.cli.parity_compare import LegReport, compare_legs
from kvpact.engine.engine import Engine
from kvpact.engine.probe import Reference, Trace, engine_trace
from kvpact.engine.trace import StateRecorder
from kvpact.handoff.landing import Landing
from kvpact.types import Sampling

FLOAT32_TOLERANCE = 1e-4


def probe_prompt(length: int, vocab_size: int) -> tuple[int, ...]:
    """A fixed prompt without repetition structure."""
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


async def run_parity(
    reference: Reference,
    writer: Engine,
    reader: Engine,
    lengths: Sequence[int],
    *,
    landing: Landing | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
) -> AsyncGenerator[LegReport, None]:
    """Both legs at every length. Both engines are started; `landing` replaces the reader's own, for controls.

    Raises:
        ContractRefused: the reader refuses the writer's cache.
    """
    async with InProcessPair(writer, reader, landing=landing) as pair:
        for length in lengths:
            prompt = probe_prompt(length, reader.model.vocab_size)
            for leg, found in (
                ("cached", await asyncio.to_thread(engine_trace, reader, prompt, OUTPUT_TOKENS)),
                ("handoff", await _handed_over(pair, prompt)),
            ):
                expected = reference.trace((*prompt, found.token_ids[0]), [length])
                yield compare_legs(leg, length, expected, found, reader=reader.contract, tolerance=tolerance)


async def _handed_over(pair: InProcessPair, prompt: tuple[int, ...]) -> Trace:
    """Prefill on one engine, one decode step on the other, watched at the decoded row."""
    recorder = StateRecorder(frozenset({len(prompt)}))
    sampling = Sampling(max_output_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first, second = [
        token async for token in pair.generate(prompt, sampling, want_logits=True, recorder=recorder)
    ]
    return Trace(
        attention=recorder, logits_nV=second.logits[None], token_ids=(first.token_id, second.token_id)
    )
