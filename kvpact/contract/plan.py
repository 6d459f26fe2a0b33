"""Steps that turn a writer's bytes into a reader's, and what they do to the numbers.

A plan undoes what the writer did to raw keys and redoes what the reader does. Both normalise, rotate,
change the basis and quantise, in this order; so a plan dequantises, unrotates, lays lanes, tokens and heads
in the reader's order, rotates and quantises. Its class is the worst over its steps.

Bound of a turn (unrotate or rotate). Take a pair of lanes of norm r, u = half an epsilon of float32, and
cos and sin good to one unit in the last place. Turning costs each lane at most 2u r for products and sum
and u r for the amplitude, sqrt(2) times that as a pair. The way back keeps the error of the way there
and adds its own, and cos^2 + sin^2 misses 1 by up to 4u: below 12u, six epsilons. A narrower store adds
half an epsilon of its own each time a number is stored, three times at most, beside which float32's
share is small: two. The bound holds for the difference to what the reader would have stored itself,
relative to r, where r is at least the smallest normal number of the dtype. Numbers of eight bits have no
bound: turning them, or putting them under other scales, is lossy even where both sides name one scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpact.contract.contract import Contract, Rotary
from kvpact.contract.numbers import NumberForm, key_form, loses, value_form
from kvpact.types import Dtype, Exactness, KeyState, PlanOp, PlanStep

TURN_BOUND_EPSILONS = {Dtype.FLOAT32: 6.0, Dtype.FLOAT16: 2.0, Dtype.BFLOAT16: 2.0}
"""Bound on a turn, in epsilons of the narrowest dtype of the keys; other dtypes have none."""
_WIDEST_FIRST = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)
_WORSE = (Exactness.BIT_EXACT, Exactness.ROUNDING, Exactness.LOSSY)


def plan_steps(writer: Contract, reader: Contract) -> tuple[PlanStep, ...]:
    """Steps, in order, from the writer's stored form to the reader's; empty if the forms are one."""
    steps = _number_steps(writer, reader) | {
        op: PlanStep(op=op, exactness=Exactness.BIT_EXACT) for op in _moves(writer, reader)
    }
    return tuple(steps[op] for op in PlanOp if op in steps)


def joint_plan(plans: Sequence[Iterable[PlanStep]]) -> tuple[PlanStep, ...]:
    """One plan that covers several writers' plans for one reader: each step once, as its worst."""
    steps: dict[PlanOp, PlanStep] = {}
    for step in (step for plan in plans for step in plan):
        known = steps.get(step.op, step)
        steps[step.op] = max(known, step, key=lambda each: _WORSE.index(each.exactness))
    return tuple(steps[op] for op in PlanOp if op in steps)


def turn_between(writer: Rotary, reader: Rotary) -> PlanOp | None:
    """The turn that takes the writer's keys to the reader's key_state; None if there is none to make."""
    match writer.key_state, reader.key_state:
        case KeyState.ROTATED, KeyState.RAW:
            return PlanOp.UNROTATE
        case KeyState.RAW, KeyState.ROTATED:
            return PlanOp.ROTATE
        case _:
            return None


def turn_bound(writer: NumberForm, reader: NumberForm) -> float | None:
    """Bound on a turn in epsilons of the narrowest dtype passed; None where the turn is lossy."""
    if writer.quantized or reader.quantized:
        return None
    if writer.dtype not in TURN_BOUND_EPSILONS or reader.dtype not in TURN_BOUND_EPSILONS:
        return None
    return TURN_BOUND_EPSILONS[max(writer.dtype, reader.dtype, key=_WIDEST_FIRST.index)]


def worst(classes: Iterable[Exactness]) -> Exactness:
    """The worst class of all; BIT_EXACT for none."""
    return max(classes, key=_WORSE.index, default=Exactness.BIT_EXACT)


def made_anew(writer: NumberForm, reader: NumberForm, *, turned: bool) -> bool:
    """Whether stored numbers under scales can't be copied as they are."""
    return (writer.quantized or reader.quantized) and (turned or writer != reader)


def _moves(writer: Contract, reader: Contract) -> list[PlanOp]:
    """Steps that move numbers without changing them."""
    ours, theirs = writer.layout, reader.layout
    pairs = _rotary_pairs(writer, reader)
    found = {
        PlanOp.GATHER: ours.shard != theirs.shard,
        PlanOp.SWAP_BYTES: ours.byte_order is not theirs.byte_order,
        PlanOp.REPACK: ours.packing is not theirs.packing,
        PlanOp.REORDER_LANES: any(a.stored_lane_order is not b.stored_lane_order for a, b in pairs),
        PlanOp.RELAYOUT: ours.axis_order is not theirs.axis_order,
        PlanOp.REBLOCK: ours.block_size != theirs.block_size,
    }
    return [op for op, needed in found.items() if needed]


def _number_steps(writer: Contract, reader: Contract) -> dict[PlanOp, PlanStep]:
    """Steps that turn keys or make numbers anew."""
    steps: list[PlanStep] = []
    met = (turn_between(ours, theirs) for ours, theirs in _rotary_pairs(writer, reader))
    turns = {turn for turn in met if turn is not None}
    keys = key_form(writer.layout), key_form(reader.layout)
    bound = turn_bound(*keys)
    for op in turns:
        exactness = Exactness.LOSSY if bound is None else Exactness.ROUNDING
        steps.append(PlanStep(op=op, exactness=exactness, bound_epsilons=bound))
    for forms, turned in (
        (keys, bool(turns)),
        ((value_form(writer.layout), value_form(reader.layout)), False),
    ):
        steps += _form_steps(*forms, turned=turned)
    return {step.op: step for step in joint_plan([steps])}


def _form_steps(writer: NumberForm, reader: NumberForm, *, turned: bool) -> list[PlanStep]:
    if made_anew(writer, reader, turned=turned):
        sides = ((PlanOp.DEQUANTIZE, writer), (PlanOp.QUANTIZE, reader))
        return [PlanStep(op=op, exactness=Exactness.LOSSY) for op, side in sides if side.quantized]
    if writer.dtype is reader.dtype:
        return []
    lossy = loses(writer, reader)
    return [PlanStep(op=PlanOp.CAST, exactness=Exactness.LOSSY if lossy else Exactness.BIT_EXACT)]


def _rotary_pairs(writer: Contract, reader: Contract) -> list[tuple[Rotary, Rotary]]:
    """Rotary parts that meet in a layer and turn at all, each pair of groups once."""
    theirs = {layer: group for group in reader.layer_groups for layer in group.layers}
    met = {
        (id(group), id(theirs[layer])): (group.rotary, theirs[layer].rotary)
        for group in writer.layer_groups
        for layer in group.layers
        if layer in theirs
    }
    return [pair for pair in met.values() if KeyState.NONE not in (pair[0].key_state, pair[1].key_state)]
