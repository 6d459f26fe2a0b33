"""Judges the probe of a new pair: one decode step from what landed against the reader's own prefill.

The probe's tokens and one more stand at positions far apart. Own computations of them are kept, since they
depend on nothing of the writer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpact.contract.canary import probe_lengths, probe_positions, probe_tokens
from kvpact.contract.contract import Contract
from kvpact.contract.witness import EPSILONS
from kvpact.engine.engine import Engine
from kvpact.engine.requests import SequenceFailed, SequenceRequest, TokenComputed
from kvpact.engine.stream import stream
from kvpact.errors import BadRequest
from kvpact.handoff.messages import CanaryOutcome, HandoffTerms
from kvpact.handoff.terms import positions_of
from kvpact.types import BlockId, Dtype, Sampling

FLOAT32_TOLERANCE = 1e-4
NOISE_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What this engine computes of one probe: logits [vocabulary], all of them by prefill."""

    first_V: torch.Tensor
    """Behind the probe."""
    next_V: torch.Tensor
    """Behind the probe and the token that is decoded from the landed cache."""
    noise: float
    """Largest difference between its own prefill and its own decode of one more token."""

    def finite(self) -> bool:
        """Whether every number is; one that isn't would make any error tolerable."""
        logits_finite = all(bool(x_V.isfinite().all()) for x_V in (self.first_V, self.next_V))
        return logits_finite and math.isfinite(self.noise)


class EngineJudge:
    """Uses the engine beside users' sequences; its work isn't counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._own: dict[tuple[tuple[int, ...], tuple[int, ...], int], _Own] = {}

    def expect(self, writer: Contract, terms: HandoffTerms) -> None:
        """See CanaryJudge."""
        ours = self._engine.contract
        if terms.table_length not in probe_lengths(writer, ours):
            raise BadRequest(
                f"no probe runs for {terms.table_length} tokens", param="terms.table_length_tokens"
            )
        if positions_of(terms.positions) != probe_positions(writer, ours, terms.table_length):
            raise BadRequest("terms.positions aren't those of the pair's probe", param="terms.positions")
        if max(terms.token_ids) >= self._engine.model.vocab_size:
            raise BadRequest("terms.token_ids are beyond the vocabulary", param="terms.token_ids")

    async def judge(
        self, writer: Contract, terms: HandoffTerms, blocks: Sequence[BlockId], first_token_id: int
    ) -> CanaryOutcome:
        """See CanaryJudge."""
        landed_V = await self._decode(terms, blocks)
        own = await self._computed(terms)
        tolerance = self._tolerance(writer, own)
        error = _gap(landed_V, own.next_V)
        finding = ""
        if not own.finite() or not math.isfinite(tolerance):
            error, tolerance = math.inf, 0.0
            finding = "this reader's own logits aren't finite, so nothing can be compared with them"
        elif not error <= tolerance:
            finding = (
                f"a token decoded from the writer's cache has logits off by {error:.3g}, "
                f"allowed {tolerance:.3g}"
            )
        elif not _may_be_first(own.first_V, first_token_id, 2 * tolerance):
            finding = (
                f"the writer's first token is {first_token_id}, this reader's own prefill gives "
                f"{int(own.first_V.argmax())}"
            )
        return CanaryOutcome(passed=not finding, max_abs_error=error, tolerance=tolerance, finding=finding)

    async def _decode(self, terms: HandoffTerms, blocks: Sequence[BlockId]) -> torch.Tensor:
        """Logits of one more token behind the landed probe."""
        pool, size = self._engine.pool, self._engine.contract.layout.block_size
        tokens, positions = self._one_more(terms)
        try:
            room = pool.allocate(max(0, -(-len(tokens) // size) - len(blocks)), "canary")
        except BaseException:
            pool.free(blocks, "canary")
            raise
        request = SequenceRequest(
            token_ids=tokens,
            positions=positions,
            sampling=_greedy(1),
            table_length=terms.table_length,
            blocks=(*blocks, *room),
            computed_tokens=len(terms.token_ids),
            blocks_holder="canary",
            stop_after_first=True,
            keep_computed=True,
            want_logits=True,
            counted=False,
        )
        return (await self._run(request))[0].logits_V

    async def _computed(self, terms: HandoffTerms) -> _Own:
        positions = positions_of(terms.positions)
        key = (terms.token_ids, positions, terms.table_length)
        if key not in self._own:
            first, decoded = await self._run(self._prefill(terms, terms.token_ids, positions, outputs=2))
            last = (*positions, positions[-1] + 1)
            again = await self._run(self._prefill(terms, (*terms.token_ids, first.token_id), last))
            tokens, _ = self._one_more(terms)
            following = await self._run(self._prefill(terms, tokens, last))
            self._own[key] = _Own(
                first_V=first.logits_V,
                next_V=following[0].logits_V,
                noise=_gap(decoded.logits_V, again[0].logits_V),
            )
        return self._own[key]

    def _one_more(self, terms: HandoffTerms) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count = len(terms.token_ids)
        extra = probe_tokens(count + 1, self._engine.model.vocab_size)[-1]
        return (*terms.token_ids, extra), (*positions_of(terms.positions), terms.next_position)

    def _prefill(
        self, terms: HandoffTerms, tokens: tuple[int, ...], positions: tuple[int, ...], *, outputs: int = 1
    ) -> SequenceRequest:
        return SequenceRequest(
            token_ids=tokens,
            positions=positions,
            sampling=_greedy(outputs),
            table_length=terms.table_length,
            want_logits=True,
            counted=False,
        )

    async def _run(self, request: SequenceRequest) -> list[_Computed]:
        computed = []
        async with contextlib.aclosing(stream(self._engine, request)) as events:
            async for event in events:
                if isinstance(event, SequenceFailed):
                    raise event.error
                if isinstance(event, TokenComputed):
                    assert event.logits is not None
                    logits_V = event.logits[: self._engine.model.vocab_size]
                    computed.append(_Computed(token_id=event.token_id, logits_V=logits_V))
        return computed

    def _tolerance(self, writer: Contract, own: _Own) -> float:
        """4 times the own noise. At least 1e-4, or in coarser dtypes twice what one rounding in each
        layer adds up to at random: the own noise can be less by chance, as where both ways round alike.
        """
        ours = self._engine.contract
        sides = (writer.layout, ours.layout)
        dtypes = {writer.model.compute_dtype, ours.model.compute_dtype}
        dtypes |= {dtype for layout in sides for dtype in (layout.key_dtype, layout.value_dtype)}
        least = FLOAT32_TOLERANCE
        if dtypes != {Dtype.FLOAT32}:
            rounding = max(EPSILONS[dtype] for dtype in dtypes) / 2 * float(own.next_V.abs().max())
            least = 2 * rounding * math.sqrt(ours.layer_count())
        return max(least, NOISE_FACTOR * own.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    token_id: int
    logits_V: torch.Tensor


def _greedy(outputs: int) -> Sampling:
    return Sampling(max_output_tokens=outputs, ignore_eos=True)


def _gap(one_V: torch.Tensor, other_V: torch.Tensor) -> float:
    return float((one_V - other_V).abs().nan_to_num(nan=math.inf).max())


def _may_be_first(own_V: torch.Tensor, token_id: int, slack: float) -> bool:
    return 0 <= token_id < own_V.numel() and bool(own_V[token_id] >= own_V.max() - slack)
