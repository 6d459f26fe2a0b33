"""Why another table is refused for raw keys too: rephased keys still come from history under the old table.

The network is that of examples/rope_experiments.py: two layers, one head of two lanes, identity projections,
residual connections, three tokens, frequencies 0.9 (old) and 0.2 (new).
"""

from __future__ import annotations

import pytest
import torch

from examples.rope_experiments import NEW, OLD, TOKENS_TD, layer, step

torch.set_num_threads(1)


def last_token(x_D: torch.Tensor, history_TD: torch.Tensor) -> torch.Tensor:
    """The third token under the new table over rephased history of one layer."""
    return step(x_D, history_TD, OLD, NEW, repair=True)


def test_rephasing_repairs_the_first_layer() -> None:
    first = last_token(TOKENS_TD[2], TOKENS_TD[:2])
    torch.testing.assert_close(first, layer(TOKENS_TD, NEW)[2], atol=1e-6, rtol=0)


def test_without_rephasing_even_the_first_layer_is_off() -> None:
    first = step(TOKENS_TD[2], TOKENS_TD[:2], OLD, NEW, repair=False)
    assert float((first - layer(TOKENS_TD, NEW)[2]).norm()) > 0.01


def test_rephasing_leaves_the_second_layer_off_by_0_04081() -> None:
    history_TD = layer(TOKENS_TD[:2], OLD)
    second = last_token(last_token(TOKENS_TD[2], TOKENS_TD[:2]), history_TD)
    fresh = layer(layer(TOKENS_TD, NEW), NEW)[2]
    assert float((second - fresh).norm()) == pytest.approx(0.04081, abs=1e-5)


def test_history_itself_is_off_by_0_11620() -> None:
    gap = layer(TOKENS_TD[:2], OLD)[1] - layer(TOKENS_TD[:2], NEW)[1]
    assert float(gap.norm()) == pytest.approx(0.11620, abs=1e-5)
