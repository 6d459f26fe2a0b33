"""Rotation of keys: right at every position, undone by its inverse, blind to nothing."""

from __future__ import annotations

import math

import pytest
import torch

from kvpact.contract.contract import RotaryTable
from kvpact.contract.plan import TURN_BOUND_EPSILONS
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.types import Dtype, LaneOrder
from tests.factories import make_rotary
from tests.reference_cache import pair_norms, random_THD, turned_THD

torch.set_num_threads(1)
POSITIONS = [0, 1, 2, 15, 16, 17, 127, 1000, 4095, 131071]
LANE_ORDERS = list(LaneOrder)


@pytest.mark.parametrize("lane_order", LANE_ORDERS)
@pytest.mark.parametrize("amplitude", [1.0, 1.2079441])
def test_rotate_agrees_with_complex_numbers_at_every_position(
    lane_order: LaneOrder, amplitude: float
) -> None:
    rotary = make_rotary(stored_lane_order=lane_order, amplitude=amplitude)
    k_THD = random_THD(tokens=len(POSITIONS))
    rotated = rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor(POSITIONS)))
    torch.testing.assert_close(rotated.double(), turned_THD(k_THD, rotary, POSITIONS), atol=2e-6, rtol=0)


def test_position_zero_rotates_nothing() -> None:
    rotary = make_rotary()
    k_THD = random_THD(tokens=1)
    assert torch.equal(rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([0]))), k_THD)


@pytest.mark.parametrize("lane_order", LANE_ORDERS)
def test_lanes_outside_the_rotary_part_keep_their_bits(lane_order: LaneOrder) -> None:
    rotary = make_rotary(rotary_dim=4, lane_offset=8, stored_lane_order=lane_order)
    k_THD = random_THD(tokens=3)
    rotated = rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([5, 6, 7])))
    assert torch.equal(rotated[..., :8], k_THD[..., :8])
    assert torch.equal(rotated[..., 12:], k_THD[..., 12:])
    assert not torch.equal(rotated[..., 8:12], k_THD[..., 8:12])
    assert not torch.equal(rotated, k_THD)


def test_the_input_is_left_alone() -> None:
    rotary = make_rotary(rotary_dim=4)
    k_THD = random_THD(tokens=2)
    before = k_THD.clone()
    rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([3, 4])))
    assert torch.equal(k_THD, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lane_order", LANE_ORDERS)
def test_unrotate_takes_rotate_back_within_the_stated_bound(
    dtype: torch.dtype, lane_order: LaneOrder
) -> None:
    rotary = make_rotary(stored_lane_order=lane_order, amplitude=1.3466)
    positions = torch.arange(2048) * 61
    raw_THD = random_THD(tokens=2048).to(dtype)
    rotation = rotation_at(rotary, rotary.tables[0], positions)
    back_THD = unrotate(rotate(raw_THD, rotation), rotation)
    epsilons = (
        (back_THD.double() - raw_THD.double()).abs() / pair_norms(raw_THD, rotary) / torch.finfo(dtype).eps
    )
    bound = TURN_BOUND_EPSILONS[Dtype(str(dtype).removeprefix("torch."))]
    assert epsilons.max() <= bound
    assert epsilons.max() > bound / 10, "a bound that nothing comes near to says nothing"


def test_a_second_rotation_is_a_key_at_twice_its_position() -> None:
    rotary = make_rotary()
    k_THD = random_THD(tokens=3)
    rotation = rotation_at(rotary, rotary.tables[0], torch.tensor([3, 4, 5]))
    twice = rotate(rotate(k_THD, rotation), rotation)
    torch.testing.assert_close(twice.double(), turned_THD(k_THD, rotary, [6, 8, 10]), atol=2e-6, rtol=0)


def test_floating_point_positions_are_refused() -> None:
    rotary = make_rotary()
    with pytest.raises(TypeError, match="integers"):
        rotation_at(rotary, rotary.tables[0], torch.tensor([1.0]))


def test_positions_beyond_bfloat16_stay_exact() -> None:
    rotary = make_rotary()
    k_THD = random_THD(tokens=1).to(torch.bfloat16)
    near, far = (rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([n]))) for n in (256, 257))
    assert not torch.equal(near, far)


def test_a_key_of_one_table_and_a_query_of_another_score_0_70711_instead_of_one_half() -> None:
    rotary = make_rotary(rotary_dim=2)
    old = RotaryTable(inv_freq=(math.pi / 2,), amplitude=1.0)
    new = RotaryTable(inv_freq=(math.pi / 4,), amplitude=1.0)
    unit_THD = torch.tensor([[[1.0, 0.0]]])
    q = rotate(unit_THD, rotation_at(rotary, new, torch.tensor([2])))
    mixed, target = (
        float((q * rotate(unit_THD, rotation_at(rotary, table, torch.tensor([1])))).sum()) / math.sqrt(2)
        for table in (old, new)
    )
    assert mixed == pytest.approx(0.70711, abs=1e-5)
    assert target == pytest.approx(0.5, abs=1e-6)
