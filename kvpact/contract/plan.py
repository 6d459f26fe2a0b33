"""Steps that turn a writer's bytes into a reader's, and what they do to the numbers.

A plan undoes what the writer did to raw keys and redoes what the reader does: undo the rotation, lay tokens
and heads in the reader's axis order, cut them into its blocks, rotate.

Bound of a turn (unrotate or rotate). Take a pair of lanes of norm r, u = half an epsilon of float32, and
cos and sin good to one unit in the last place. Turning costs each lane at most 2u r for products and sum
and u r for the amplitude, sqrt(2) times that as a pair. The way back keeps the error of the way there
and adds its own, and cos^2 + sin^2 misses 1 by up to 4u: below 12u, six epsilons. A narrower store adds
half an epsilon of its own each time a number is stored, three times at most, beside which float32's
share is small: two. The bound holds for the difference to what the reader would have stored itself,
relative to r, where r is at least the smallest normal number of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpact.contract.contract import Contract, Layout, Rotary
from kvpact.types import Dtype, Exactness, KeyState, PlanOp, PlanStep, QuantizationScheme

TURN_BOUND_EPSILONS = {Dtype.FLOAT32: 6.0, Dtype.FLOAT16: 2.0, Dtype.BFLOAT16: 2.0}
"""Bound on a turn, in epsilons of the dtype of the keys; other dtypes have none."""
_WORSE = (Exactness.BIT_EXACT, Exactness.ROUNDING, Exactness.LOSSY)


def plan_steps(writer: Contract, reader: Contract) -> tuple[PlanStep, ...]:
    """Steps, in order, from the writer's stored form to the reader's; empty if the forms are one."""
    turns = {turn_between(ours, theirs) for ours, theirs in _rotary_pairs(writer, reader)}
    ops: list[PlanOp] = []
    if PlanOp.UNROTATE in turns:
        ops.append(PlanOp.UNROTATE)
    if writer.layout.axis_order is not reader.layout.axis_order:
        ops.append(PlanOp.RELAYOUT)
    if writer.layout.block_size != reader.layout.block_size:
        ops.append(PlanOp.REBLOCK)
    if PlanOp.ROTATE in turns:
        ops.append(PlanOp.ROTATE)
    return tuple(_step(op, writer.layout, reader.layout) for op in ops)


def turn_between(writer: Rotary, reader: Rotary) -> PlanOp | None:
    """The turn that takes the writer's keys to the reader's key_state; None if there is none to make."""
    match writer.key_state, reader.key_state:
        case KeyState.ROTATED, KeyState.RAW:
            return PlanOp.UNROTATE
        case KeyState.RAW, KeyState.ROTATED:
            return PlanOp.ROTATE
        case _:
            return None


def worst(classes: Iterable[Exactness]) -> Exactness:
    """The worst class of all; BIT_EXACT for none."""
    return max(classes, key=_WORSE.index, default=Exactness.BIT_EXACT)


def _step(op: PlanOp, writer: Layout, reader: Layout) -> PlanStep:
    if op in (PlanOp.RELAYOUT, PlanOp.REBLOCK):
        return PlanStep(op=op, exactness=Exactness.BIT_EXACT)
    bounds = [TURN_BOUND_EPSILONS.get(layout.key_dtype) for layout in (writer, reader)]
    schemes = {layout.key_quantization.scheme for layout in (writer, reader)}
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds) or schemes != {QuantizationScheme.NONE}:
        return PlanStep(op=op, exactness=Exactness.LOSSY)
    return PlanStep(op=op, exactness=Exactness.ROUNDING, bound_epsilons=max(known))


def _rotary_pairs(writer: Contract, reader: Contract) -> set[tuple[Rotary, Rotary]]:
    theirs = {layer: group.rotary for group in reader.layer_groups for layer in group.layers}
    return {
        (group.rotary, theirs[layer])
        for group in writer.layer_groups
        for layer in group.layers
        if layer in theirs
    }
