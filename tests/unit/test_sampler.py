"""Greedy picks the largest logit and refuses what has none."""

from __future__ import annotations

import torch

from kvpact.engine.sampler import greedy


def test_the_largest_logit_wins_in_each_row() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])) == [1, 0]


def test_equal_logits_give_the_lowest_id() -> None:
    assert greedy(torch.zeros(2, 300)) == [0, 0]


def test_a_row_with_a_nan_has_no_token_and_spoils_no_other() -> None:
    assert greedy(torch.tensor([[0.0, torch.nan], [0.0, 1.0]])) == [None, 1]
