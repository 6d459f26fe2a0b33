"""Why another table is refused for raw keys too: rephased keys still come from history under the old table.

Two layers, one head of two lanes, identity projections, residual connections, three tokens, frequencies 0.9
(old) and 0.2 (new).
"""

from __future__ import annotations

import math

import pytest
import torch

from kvpact.contract.contract import RotaryTable
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from tests.factories import make_rotary

torch.set_num_threads(1)
ROTARY = make_rotary(rotary_dim=2)
OLD = RotaryTable(inv_freq=(0.9,), amplitude=1.0)
NEW = RotaryTable(inv_freq=(0.2,), amplitude=1.0)
TOKENS_TD = torch.tensor([[1.0, 0.2], [0.3, 1.0], [-0.8, 0.4]])


def turn(x_TD: torch.Tensor, table: RotaryTable, start: int = 0) -> torch.Tensor:
    """[T, 2] rotated at positions start, start + 1, ..."""
    return rotate(x_TD[:, None], rotation_at(ROTARY, table, torch.arange(start, start + len(x_TD))))[:, 0]


def attend(q_D: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor) -> torch.Tensor:
    """One query over all given keys."""
    return ((k_TD @ q_D) / math.sqrt(2)).softmax(0) @ v_TD


def layer(x_TD: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Causal attention with a residual connection."""
    turned_TD = turn(x_TD, table)
    rows = [attend(turned_TD[t], turned_TD[: t + 1], x_TD[: t + 1]) for t in range(len(x_TD))]
    return x_TD + torch.stack(rows)


def rephased(history_TD: torch.Tensor) -> torch.Tensor:
    """Keys cached under the old table, brought to the new one."""
    positions = torch.arange(len(history_TD))
    raw = unrotate(turn(history_TD, OLD)[:, None], rotation_at(ROTARY, OLD, positions))
    return rotate(raw, rotation_at(ROTARY, NEW, positions))[:, 0]


def last_token(x_D: torch.Tensor, history_TD: torch.Tensor) -> torch.Tensor:
    """The third token under the new table over rephased history of one layer."""
    q_D = turn(x_D[None], NEW, start=len(history_TD))[0]
    keys, values = torch.cat((rephased(history_TD), q_D[None])), torch.cat((history_TD, x_D[None]))
    return x_D + attend(q_D, keys, values)


def test_rephasing_repairs_the_first_layer() -> None:
    first = last_token(TOKENS_TD[2], TOKENS_TD[:2])
    torch.testing.assert_close(first, layer(TOKENS_TD, NEW)[2], atol=1e-6, rtol=0)


def test_rephasing_leaves_the_second_layer_off_by_0_04081() -> None:
    history_TD = layer(TOKENS_TD[:2], OLD)
    second = last_token(last_token(TOKENS_TD[2], TOKENS_TD[:2]), history_TD)
    fresh = layer(layer(TOKENS_TD, NEW), NEW)[2]
    assert float((second - fresh).norm()) == pytest.approx(0.04081, abs=1e-5)


def test_history_itself_is_off_by_0_11620() -> None:
    gap = layer(TOKENS_TD[:2], OLD)[1] - layer(TOKENS_TD[:2], NEW)[1]
    assert float(gap.norm()) == pytest.approx(0.11620, abs=1e-5)
