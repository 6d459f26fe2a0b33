"""Plans: the right steps in the right order, as exact as their worst step."""

from __future__ import annotations

import itertools

import pytest

from kvpact.contract.compare import Policy, compare
from kvpact.contract.plan import plan_steps, worst
from kvpact.types import AxisOrder, Dtype, Exactness, KeyState, PlanOp
from tests.factories import make_contract, make_group, make_rotary

OTHER_STATE = {KeyState.RAW: KeyState.ROTATED, KeyState.ROTATED: KeyState.RAW}


def test_one_form_needs_no_step() -> None:
    assert plan_steps(make_contract(), make_contract()) == ()


@pytest.mark.parametrize(
    ("writes", "ops"),
    [
        (KeyState.ROTATED, [PlanOp.UNROTATE, PlanOp.RELAYOUT, PlanOp.REBLOCK]),
        (KeyState.RAW, [PlanOp.RELAYOUT, PlanOp.REBLOCK, PlanOp.ROTATE]),
    ],
)
def test_the_write_order_is_undone_before_the_readers_is_redone(writes: KeyState, ops: list[PlanOp]) -> None:
    reader = make_contract(key_state=OTHER_STATE[writes], axis_order=AxisOrder.HND, block_size=24)
    assert [step.op for step in plan_steps(make_contract(key_state=writes), reader)] == ops


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
