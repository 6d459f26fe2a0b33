"""Proof at load that the contract's table is what runs: the engine against the model's own eager forward.

A contiguous short probe can't see scaled frequencies, so positions spread from the first to the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvpact.contract.canary import probe_positions, probe_tokens
from kvpact.contract.contract import Contract
from kvpact.engine.batch import Span, Step
from kvpact.engine.model import HostedModel
from kvpact.engine.trace import QueryKeyRecorder
from kvpact.errors import SelfCheckFailed
from kvpact.kvcache.paged_cache import TORCH_DTYPES, PagedCache
from kvpact.types import BlockId, LaneOrder

FLOAT32_TOLERANCE = 1e-4
FLOAT32_ROUNDINGS = 64
NOISE_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fixed sequence with explicit positions."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """What one way of computing the probe gave: queries and keys by layer, logits of the last token."""

    queries: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]
    logits_V: torch.Tensor


def make_probe(vocab_size: int, contract: Contract) -> Probe:
    """Positions that a pair's probe takes too, near zero and at each window's edge, and the largest one."""
    last = contract.model.context_tokens - 1
    spread = probe_positions(contract, contract, last + 2)
    positions = (*spread, last)
    return Probe(token_ids=probe_tokens(len(positions), vocab_size), positions=positions)


def self_check(model: HostedModel, contract: Contract) -> None:
    """Compares the probe, in one prefill and again with a cached decode step, with the model's own forward.

    Raises:
        SelfCheckFailed: names the first layer that differs, what differs in it and by how much.
    """
    probe = make_probe(model.vocab_size, contract)
    own = _own_leg(model, probe)
    whole = _engine_leg(model, contract, probe, split=len(probe.positions))
    cached = _engine_leg(model, contract, probe, split=len(probe.positions) - 1)
    tolerance = _Tolerance(_coarsest(model, contract), whole, cached)
    for name, leg in (("prefill", whole), ("cached decode", cached)):
        _compare(name, own, leg, tolerance)


class _Tolerance:
    """In float32 1e-4, or 64 roundings of the largest number times the root of the layers passed if that is
    more. In a coarser dtype 4 times the larger of two: the engine's own prefill-against-decode noise, and one
    rounding for each layer passed.
    """

    def __init__(self, epsilon: float, whole: _Leg, cached: _Leg) -> None:
        self._epsilon = epsilon
        self._exact = epsilon <= torch.finfo(torch.float32).eps
        self._whole, self._cached = whole, cached

    def keys(self, layer: int) -> float:
        return self._allowed(self._whole.keys[layer], self._cached.keys[layer], layer)

    def queries(self, layer: int) -> float:
        last = self._whole.queries[layer][-1:]
        return self._allowed(last, self._cached.queries[layer][-1:], layer)

    def logits(self) -> float:
        return self._allowed(self._whole.logits_V, self._cached.logits_V, len(self._whole.keys))

    def _allowed(self, whole: torch.Tensor, cached: torch.Tensor, layer: int) -> float:
        if self._exact:
            roundings = FLOAT32_ROUNDINGS * math.sqrt(layer + 1)
            return max(FLOAT32_TOLERANCE, roundings * self._epsilon * float(whole.abs().max()))
        noise = float((whole - cached).abs().max())
        rounding = self._epsilon * (layer + 1) * float(whole.abs().max())
        return NOISE_FACTOR * max(noise, rounding)


def _coarsest(model: HostedModel, contract: Contract) -> float:
    stored = (TORCH_DTYPES[contract.layout.key_dtype], TORCH_DTYPES[contract.layout.value_dtype])
    return max(torch.finfo(dtype).eps for dtype in (model.dtype, *stored))


def _compare(name: str, own: _Leg, leg: _Leg, tolerance: _Tolerance) -> None:
    for layer in sorted(own.keys):
        rows = leg.queries[layer].shape[0]
        _check(name, layer, "query", own.queries[layer][-rows:], leg.queries[layer], tolerance.queries(layer))
        _check(name, layer, "key", own.keys[layer], leg.keys[layer], tolerance.keys(layer))
    _check(name, None, "logits", own.logits_V, leg.logits_V, tolerance.logits())


def _check(
    name: str, layer: int | None, what: str, own: torch.Tensor, found: torch.Tensor, allowed: float
) -> None:
    gap = float((own - found).abs().nan_to_num(nan=torch.inf).max())
    if gap > allowed:
        where = "" if layer is None else f"layer {layer}, "
        raise SelfCheckFailed(
            f"self-check, {name}: {where}{what} differs from the model's own forward by {gap:.3g}, "
            f"allowed {allowed:.3g}; the contract isn't what the model computes, so it isn't served"
        )


def _own_leg(model: HostedModel, probe: Probe) -> _Leg:
    recorder = QueryKeyRecorder()
    last = torch.tensor([len(probe.positions) - 1], device=model.device)
    logits_1V = model.own_forward(list(probe.token_ids), list(probe.positions), recorder, last)
    return _Leg(queries=recorder.queries, keys=recorder.keys, logits_V=logits_1V[0].float())


def _engine_leg(model: HostedModel, contract: Contract, probe: Probe, *, split: int) -> _Leg:
    """The probe's first `split` tokens in one forward, the rest in a second, through a cache of its own."""
    count = len(probe.positions)
    blocks = [BlockId(block) for block in range(-(-count // contract.layout.block_size))]
    cache = PagedCache(contract, len(blocks), model.device)
    recorder = QueryKeyRecorder()
    logits_1V = torch.empty(0)
    for start, end in ((0, split), (split, count)):
        if start == end:
            continue
        span = Span(
            token_ids=probe.token_ids[start:end],
            positions=probe.positions[:end],
            blocks=blocks,
            samples=True,
            recorder=recorder,
        )
        logits_1V = model.forward(Step(cache, [span]))
    queries, keys = _half_split(contract, recorder.queries), _half_split(contract, recorder.keys)
    return _Leg(queries=queries, keys=keys, logits_V=logits_1V[0].float())


def _half_split(contract: Contract, by_layer: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Undoes an adjacent lane order, since models compute in half-split lanes."""
    undone = {}
    for layer, x_THD in by_layer.items():
        rotary = contract.group_of(layer).rotary
        start, end = rotary.lane_offset, rotary.lane_offset + rotary.rotary_dim
        undone[layer] = x_THD
        if rotary.stored_lane_order is LaneOrder.ADJACENT:
            lanes = x_THD[..., start:end].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            undone[layer] = torch.cat((x_THD[..., :start], lanes, x_THD[..., end:]), dim=-1)
    return undone
