"""What one way of computing a row gave against the reference, for every quantity, layer and place.

Legend: L layers, n positions, Q query heads, H KV heads, D lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.rotation import lane_permutation
from kvpact.engine.probe import Trace
from kvpact.engine.trace import Divergence, first_divergence
from kvpact.types import LaneOrder

KEYS, VALUES = "keys", "values"
ATTENTION_LOGITS, ATTENTION_OUTPUTS = "attention_logits", "attention_outputs"
TINY = 1e-30
QUANTITIES = (KEYS, VALUES, ATTENTION_LOGITS, ATTENTION_OUTPUTS)
"""In the order in which a layer computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A number that is off: where it is, and both values."""

    layer: int
    head: int
    position: int
    """Of the key or value; of attention outputs that of the query."""
    reference: float
    found: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityReport:
    """One quantity over all layers."""

    name: str
    max_abs: tuple[float, ...]
    """Largest absolute difference, by layer."""
    max_rel: tuple[float, ...]
    """That difference over the layer's largest reference number."""
    first: Place | None
    """First place beyond tolerance, by layer, position and head."""
    by_position_Ln: torch.Tensor
    """Largest absolute difference at each layer and position; attention outputs have the query's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReport:
    """One way of computing the row at position `prompt_tokens`, against the reference."""

    leg: str
    """"cached" (one engine) or "handoff" (two engines and a handoff)."""
    prompt_tokens: int
    quantities: tuple[QuantityReport, ...]
    logits_max_abs: float
    logits_max_rel: float
    tolerance: float
    divergence: Divergence | None
    """First attention logit that is off."""

    @property
    def attention_max_abs(self) -> tuple[float, ...]:
        """Largest absolute difference of attention logits, by layer."""
        return self.quantity(ATTENTION_LOGITS).max_abs

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        within = all(quantity.first is None for quantity in self.quantities)
        return within and self.divergence is None and self.logits_max_abs <= self.tolerance

    @property
    def first(self) -> tuple[str, Place] | None:
        """The first quantity that is off, by layer and then in the order of computation."""
        off = [(quantity.name, quantity.first) for quantity in self.quantities if quantity.first is not None]
        return min(off, key=lambda each: (each[1].layer, QUANTITIES.index(each[0])), default=None)

    def quantity(self, name: str) -> QuantityReport:
        """The report of one quantity."""
        return next(quantity for quantity in self.quantities if quantity.name == name)


def compare_legs(
    leg: str, position: int, expected: Trace, found: Trace, *, reader: Contract, tolerance: float
) -> LegReport:
    """Compares the rows of `position`, the last one of both traces.

    Attention logits and final logits may be off by `tolerance`; keys, values and outputs by as much of the
    layer's largest number where that is above 1.
    """
    layers = sorted(layer for layer, row in expected.attention.logits if row == position)
    gap = float(_apart(expected.logits_nV[-1], found.logits_nV[-1]).max())
    return LegReport(
        leg=leg,
        prompt_tokens=position,
        quantities=tuple(
            _quantity(
                name,
                layers,
                position,
                rows(expected, position),
                rows(found, position, reader),
                tolerance=tolerance,
            )
            for name, rows in _READERS.items()
        ),
        logits_max_abs=gap,
        logits_max_rel=gap / max(float(expected.logits_nV[-1].abs().max()), TINY),
        tolerance=tolerance,
        divergence=first_divergence(expected.attention, found.attention, tolerance),
    )


Rows = Callable[[int], torch.Tensor]
"""Layer to [n, heads, lanes]; attention logits have one lane."""


def _quantity(
    name: str, layers: list[int], position: int, expected: Rows, found: Rows, *, tolerance: float
) -> QuantityReport:
    start = position if name == ATTENTION_OUTPUTS else 0
    max_abs, max_rel, maps = [], [], []
    first: Place | None = None
    for layer in layers:
        reference, seen = expected(layer), found(layer)
        count = min(len(reference), len(seen))
        reference, seen = reference[:count], seen[:count]
        gap_nHD = _apart(reference, seen)
        largest = float(reference.abs().max())
        allowed = tolerance if name == ATTENTION_LOGITS else tolerance * max(1.0, largest)
        max_abs.append(float(gap_nHD.max()))
        max_rel.append(max_abs[-1] / max(largest, TINY))
        maps.append(gap_nHD.amax(dim=(1, 2)))
        if first is None and max_abs[-1] > allowed:
            first = _place(layer, start, (reference, seen), gap_nHD > allowed)
    return QuantityReport(
        name=name,
        max_abs=tuple(max_abs),
        max_rel=tuple(max_rel),
        first=first,
        by_position_Ln=torch.stack(maps),
    )


def _place(layer: int, start: int, both: tuple[torch.Tensor, torch.Tensor], off_nHD: torch.Tensor) -> Place:
    index = tuple(int(part) for part in off_nHD.nonzero()[0])
    reference, found = (float(x_nHD[index]) for x_nHD in both)
    return Place(layer=layer, head=index[1], position=start + index[0], reference=reference, found=found)


def _apart(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Absolute difference; a NaN is infinitely far off."""
    return (reference - found).abs().nan_to_num(nan=torch.inf)


def _keys(trace: Trace, position: int, reader: Contract | None = None) -> Rows:
    return lambda layer: _half_split(trace.attention.keys[layer], layer, reader)


def _values(trace: Trace, position: int, reader: Contract | None = None) -> Rows:
    return lambda layer: trace.attention.values[layer]


def _logits(trace: Trace, position: int, reader: Contract | None = None) -> Rows:
    return lambda layer: trace.attention.logits[layer, position].T[:, :, None]


def _outputs(trace: Trace, position: int, reader: Contract | None = None) -> Rows:
    return lambda layer: trace.attention.outputs[layer, position][None]


_READERS: dict[str, Callable[..., Rows]] = {
    KEYS: _keys,
    VALUES: _values,
    ATTENTION_LOGITS: _logits,
    ATTENTION_OUTPUTS: _outputs,
}


def _half_split(k_nHD: torch.Tensor, layer: int, reader: Contract | None) -> torch.Tensor:
    """Keys of an engine in the lane order of models."""
    if reader is None:
        return k_nHD
    lanes = lane_permutation(reader.group_of(layer).rotary, LaneOrder.HALF_SPLIT, k_nHD.shape[-1])
    return k_nHD if lanes is None else k_nHD[..., list(lanes)]
