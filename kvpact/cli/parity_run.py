"""Parity of one model: the engine's cached prefill and decode, with and without a handoff, against a full forward.

The reference is the model's own eager forward without a cache over the prompt and one more token. A prefill-only
comparison can't see a doubled rotation, so what is compared is the row of the token that is decoded from the cache:
attention logits of every layer, then the final logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpact.cli.pair import InProcessPair
from kvpact.engine.engine import Engine
from kvpact.engine.requests import SequenceFailed, SequenceRequest, TokenComputed
from kvpact.engine.stream import stream
from kvpact.engine.trace import Divergence, LogitRecorder, first_divergence
from kvpact.handoff.landing import Landing
from kvpact.types import Sampling

FLOAT32_TOLERANCE = 1e-4
TWO_TOKENS = Sampling(max_output_tokens=2, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReport:
    """One way of computing the row at position `prompt_tokens`, against the reference."""

    leg: str
    """"cached" (one engine) or "handoff" (two engines and a handoff)."""
    prompt_tokens: int
    attention_max_abs: tuple[float, ...]
    """Largest absolute difference of attention logits, by layer."""
    logits_max_abs: float
    tolerance: float
    divergence: Divergence | None

    @property
    def passed(self) -> bool:
        """Whether every layer and the final logits are within tolerance."""
        return self.divergence is None and self.logits_max_abs <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    token_ids: tuple[int, ...]
    """Prompt and the token whose row was recorded."""
    recorder: LogitRecorder
    logits_V: torch.Tensor


def probe_prompt(length: int, vocab_size: int) -> tuple[int, ...]:
    """A fixed prompt without repetition structure."""
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


async def run_parity(
    writer: Engine,
    reader: Engine,
    lengths: tuple[int, ...],
    *,
    landing: Landing | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
) -> list[LegReport]:
    """Both legs at every length. Both engines are started; `landing` replaces the reader's own, for controls.

    Raises:
        ContractRefused: the reader refuses the writer's cache.
    """
    reports: list[LegReport] = []
    async with InProcessPair(writer, reader, landing=landing) as pair:
        for length in lengths:
            prompt = probe_prompt(length, reader.model.vocab_size)
            for leg, row in (
                ("cached", await _cached_row(reader, prompt)),
                ("handoff", await _handoff_row(pair, prompt)),
            ):
                reports.append(_compare(reader, leg, row, tolerance))
    return reports


async def _cached_row(engine: Engine, prompt: tuple[int, ...]) -> _Row:
    recorder = LogitRecorder(frozenset({len(prompt)}))
    request = SequenceRequest(
        token_ids=prompt,
        sampling=TWO_TOKENS,
        table_length=len(prompt) + TWO_TOKENS.max_output_tokens,
        want_logits=True,
        recorder=recorder,
    )
    tokens: list[TokenComputed] = []
    async for event in stream(engine, request):
        if isinstance(event, SequenceFailed):
            raise event.error
        if isinstance(event, TokenComputed):
            tokens.append(event)
    first, second = tokens
    assert second.logits is not None
    return _Row(token_ids=(*prompt, first.token_id), recorder=recorder, logits_V=second.logits)


async def _handoff_row(pair: InProcessPair, prompt: tuple[int, ...]) -> _Row:
    recorder = LogitRecorder(frozenset({len(prompt)}))
    tokens = [token async for token in pair.generate(prompt, TWO_TOKENS, want_logits=True, recorder=recorder)]
    first, second = tokens
    return _Row(token_ids=(*prompt, first.token_id), recorder=recorder, logits_V=second.logits)


def _compare(engine: Engine, leg: str, row: _Row, tolerance: float) -> LegReport:
    position = len(row.token_ids) - 1
    reference = LogitRecorder(frozenset({position}))
    last = torch.tensor([position], device=engine.model.device)
    expected_V = engine.model.own_forward(list(row.token_ids), list(range(position + 1)), reference, last)[0].float()
    gaps = [
        float((reference.logits[layer, position] - row.recorder.logits[layer, position]).abs().max())
        for layer in range(engine.model.layer_count)
    ]
    return LegReport(
        leg=leg,
        prompt_tokens=position,
        attention_max_abs=tuple(gaps),
        logits_max_abs=float((expected_V - row.logits_V).abs().max()),
        tolerance=tolerance,
        divergence=first_divergence(reference, row.recorder, tolerance),
    )
