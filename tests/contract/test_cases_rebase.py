"""Cached pieces put at other positions: their keys are turned by the shift, and nothing else is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpact.contract.contract import RotaryTable
from kvpact.contract.rotation import rebase, rephase
from kvpact.errors import BadRequest
from kvpact.types import Basis, FrequencyPolicy, KeyState, LaneOrder
from tests.factories import make_inv_freq, make_rotary
from tests.reference_cache import attend, random_THD, turned_THD

torch.set_num_threads(1)
HERE, THERE = list(range(16)), list(range(16, 32))


@pytest.mark.parametrize("order", LaneOrder)
@pytest.mark.parametrize("amplitude", [1.0, 1.2079441])
def test_a_fragment_moved_by_sixteen_has_the_keys_of_its_new_positions(
    order: LaneOrder, amplitude: float
) -> None:
    rotary = make_rotary(rotary_dim=8, stored_lane_order=order, amplitude=amplitude)
    raw_THD = random_THD(tokens=16)
    stored = turned_THD(raw_THD, rotary, HERE).float()
    moved = rebase(stored, rotary, torch.tensor(HERE), 16)
    expected = turned_THD(raw_THD, rotary, THERE)
    torch.testing.assert_close(moved.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rebase(moved, rotary, torch.tensor(THERE), -16), stored, atol=1e-5, rtol=0)
    assert (stored.double() - expected).abs().max() > 0.1, "left where they are, the keys are wrong"


@pytest.mark.parametrize("start", [0, 100_000])
def test_moved_keys_agree_with_canonical_angles_far_out(start: int) -> None:
    rotary, positions = make_rotary(), list(range(start, start + 16))
    raw_THD = random_THD(tokens=16)
    stored = turned_THD(raw_THD, rotary, positions).float()
    moved = rebase(stored, rotary, torch.tensor(positions), 31)
    expected = turned_THD(raw_THD, rotary, [position + 31 for position in positions])
    torch.testing.assert_close(moved.double(), expected, atol=1e-5, rtol=0)


def test_values_of_a_moved_fragment_never_saw_the_prefix_so_the_output_is_only_close() -> None:
    x_THD = random_THD(tokens=32)
    seen = torch.stack([attend(x_THD[t], x_THD[: t + 1], x_THD[: t + 1], 0.25) for t in range(32)])
    apart = torch.stack([attend(x_THD[t], x_THD[16 : t + 1], x_THD[16 : t + 1], 0.25) for t in range(16, 32)])
    assert (seen[16:] - apart).abs().max() > 0.1


@pytest.mark.parametrize("state", [KeyState.RAW, KeyState.NONE])
def test_keys_without_an_angle_in_them_come_back_as_they_are(state: KeyState) -> None:
    rotary, k_THD = make_rotary(key_state=state), random_THD(tokens=4)
    table = make_rotary(theta=1e6).tables[0]
    assert torch.equal(rebase(k_THD, rotary, torch.arange(4), 16), k_THD)
    assert torch.equal(rephase(k_THD, rotary, table, table, torch.arange(4)), k_THD)


def test_a_table_of_each_length_is_refused() -> None:
    short, long = (
        RotaryTable(inv_freq=make_inv_freq(theta=theta), amplitude=1.0, upper_length=upper)
        for theta, upper in ((1e4, 32), (1e6, None))
    )
    for policy in FrequencyPolicy:
        if policy is FrequencyPolicy.FROZEN:
            continue
        rotary = replace(make_rotary(), tables=(short, long), frequency_policy=policy)
        with pytest.raises(BadRequest, match="frequency_policy"):
            rebase(random_THD(tokens=4), rotary, torch.arange(4), 16)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"mrope_sections": (4, 2, 2)}, "mrope_sections"), ({"basis": Basis.HADAMARD}, "basis")],
)
def test_keys_that_no_single_angle_turned_are_refused(changes: dict[str, object], field: str) -> None:
    rotary = replace(make_rotary(), **changes)  # type: ignore[arg-type]
    table = rotary.tables[0]
    with pytest.raises(BadRequest) as refusal:
        rebase(random_THD(tokens=4), rotary, torch.arange(4), 16)
    assert refusal.value.param == field
    with pytest.raises(BadRequest):
        rephase(random_THD(tokens=4), rotary, table, table, torch.arange(4))


def test_a_shift_below_position_zero_is_refused() -> None:
    with pytest.raises(BadRequest, match="position -1"):
        rebase(random_THD(tokens=4), make_rotary(), torch.arange(4), -1)


def test_rephased_keys_have_the_angles_and_the_amplitude_of_the_new_table() -> None:
    rotary, raw_THD = make_rotary(amplitude=1.2), random_THD(tokens=16)
    new = RotaryTable(inv_freq=make_inv_freq(theta=1e6), amplitude=1.5)
    stored = turned_THD(raw_THD, rotary, HERE).float()
    moved = rephase(stored, rotary, rotary.tables[0], new, torch.tensor(HERE))
    torch.testing.assert_close(moved.double(), turned_THD(raw_THD, rotary, HERE, new), atol=1e-5, rtol=0)
