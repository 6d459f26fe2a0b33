"""Plans: the right steps in the right order, as exact as their worst step."""

from __future__ import annotations

import itertools

import pytest

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Quantization
from kvpact.contract.plan import joint_plan, plan_steps, worst
from kvpact.types import (
    AxisOrder,
    Dtype,
    Exactness,
    KeyState,
    LaneOrder,
    PlanOp,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
)
from tests.factories import make_contract, make_group, make_rotary, with_layout

OTHER_STATE = {KeyState.RAW: KeyState.ROTATED, KeyState.ROTATED: KeyState.RAW}


def test_one_form_needs_no_step() -> None:
    assert plan_steps(make_contract(), make_contract()) == ()


QUANTIZED = Quantization(
    scheme=QuantizationScheme.SYMMETRIC,
    granularity=QuantizationGranularity.HEAD,
    scale_source=ScaleSource.SHIPPED,
)
MOVED = [PlanOp.REORDER_LANES, PlanOp.RELAYOUT, PlanOp.REBLOCK]


@pytest.mark.parametrize(
    ("writes", "ops"),
    [
        (KeyState.ROTATED, [PlanOp.DEQUANTIZE, PlanOp.UNROTATE, *MOVED, PlanOp.QUANTIZE]),
        (KeyState.RAW, [PlanOp.DEQUANTIZE, *MOVED, PlanOp.ROTATE, PlanOp.QUANTIZE]),
    ],
)
def test_the_write_order_is_undone_before_the_readers_is_redone(writes: KeyState, ops: list[PlanOp]) -> None:
    reader = make_contract(
        key_state=OTHER_STATE[writes],
        axis_order=AxisOrder.HND,
        block_size=24,
        stored_lane_order=LaneOrder.ADJACENT,
    )
    writer, reader = (
        with_layout(side, key_dtype=Dtype.INT8, key_quantization=QUANTIZED)
        for side in (make_contract(key_state=writes), reader)
    )
    steps = plan_steps(writer, reader)
    assert [step.op for step in steps] == ops
    turns = {step.op: step.exactness for step in steps}
    assert all(turns[op] is Exactness.LOSSY for op in turns if op not in MOVED)


def test_several_writers_plans_become_one_with_each_step_as_its_worst() -> None:
    reader = make_contract(key_state=KeyState.RAW, block_size=24)
    plans = [
        plan_steps(make_contract(), reader),
        plan_steps(make_contract(dtype=Dtype.FLOAT8_E4M3, block_size=24), reader),
    ]
    joint = {step.op: step.exactness for step in joint_plan(plans)}
    assert list(joint) == [PlanOp.UNROTATE, PlanOp.REBLOCK, PlanOp.CAST]
    assert joint[PlanOp.UNROTATE] is Exactness.LOSSY


def test_layers_that_turn_both_ways_share_one_plan() -> None:
    raw, rotated = (make_rotary(key_state=state) for state in (KeyState.RAW, KeyState.ROTATED))
    writer, reader = (
        make_contract(layer_groups=(make_group(layers=(0,), rotary=a), make_group(layers=(1,), rotary=b)))
        for a, b in ((raw, rotated), (rotated, raw))
    )
    assert [step.op for step in plan_steps(writer, reader)] == [PlanOp.UNROTATE, PlanOp.ROTATE]


@pytest.mark.parametrize(("dtype", "bound"), [(Dtype.FLOAT32, 6), (Dtype.FLOAT16, 2), (Dtype.BFLOAT16, 2)])
def test_a_turn_is_rounding_within_a_bound_of_its_dtype(dtype: Dtype, bound: float) -> None:
    (step,) = plan_steps(make_contract(dtype=dtype), make_contract(dtype=dtype, key_state=KeyState.RAW))
    assert (step.exactness, step.bound_epsilons) == (Exactness.ROUNDING, bound)


def test_a_turn_of_eight_bit_keys_is_lossy() -> None:
    (step,) = plan_steps(
        make_contract(dtype=Dtype.INT8), make_contract(dtype=Dtype.INT8, key_state=KeyState.RAW)
    )
    assert (step.exactness, step.bound_epsilons) == (Exactness.LOSSY, None)


@pytest.mark.parametrize(
    ("state", "axis_order", "block_size"),
    list(itertools.product((KeyState.ROTATED, KeyState.RAW), AxisOrder, (16, 24))),
)
def test_the_whole_is_as_exact_as_its_worst_step(
    state: KeyState, axis_order: AxisOrder, block_size: int
) -> None:
    reader = make_contract(key_state=state, axis_order=axis_order, block_size=block_size)
    verdict = compare(make_contract(), reader, Policy(), 4096)
    assert verdict.exactness is worst(step.exactness for step in verdict.plan)
    turned = state is KeyState.RAW
    assert verdict.exactness is (Exactness.ROUNDING if turned else Exactness.BIT_EXACT)


def test_the_worst_of_nothing_is_bit_exact() -> None:
    assert worst(()) is Exactness.BIT_EXACT
    assert worst((Exactness.LOSSY, Exactness.ROUNDING)) is Exactness.LOSSY
