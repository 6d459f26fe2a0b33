"""Grouped attention over gathered keys, against the formula written out."""

from __future__ import annotations

import pytest
import torch

from kvpact.engine.attention import attend

SCALE = 0.25


def written_out(
    q_BtQD: torch.Tensor, k_BHnD: torch.Tensor, v_BHnD: torch.Tensor, visible_Btn: torch.Tensor
) -> torch.Tensor:
    """Keys and values multiplied out to query heads, one row at a time; rows that see no key stay 0."""
    out = torch.zeros_like(q_BtQD)
    groups = q_BtQD.shape[2] // k_BHnD.shape[1]
    for sequence, row, head in torch.cartesian_prod(
        *(torch.arange(size) for size in q_BtQD.shape[:3])
    ).tolist():
        seen = visible_Btn[sequence, row]
        if seen.any():
            keys, values = k_BHnD[sequence, head // groups, seen], v_BHnD[sequence, head // groups, seen]
            weights = (keys @ q_BtQD[sequence, row, head] * SCALE).softmax(dim=0)
            out[sequence, row, head] = weights @ values
    return out


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("query_heads", "heads"), [(4, 2), (9, 3), (3, 3), (4, 1)])
def test_grouped_heads_give_what_the_formula_says(rows: int, query_heads: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(rows * query_heads)
    q = torch.randn((3, rows, query_heads, 16), generator=generator)
    k, v = (torch.randn((3, heads, 20, 16), generator=generator) for _ in range(2))
    visible = torch.rand((3, rows, 20), generator=generator) < 0.5
    torch.testing.assert_close(attend(q, k, v, visible, SCALE), written_out(q, k, v, visible))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_no_key_gives_zero_and_no_nan(rows: int, dtype: torch.dtype) -> None:
    q, k, v = torch.ones((1, rows, 4, 16)), torch.ones((1, 2, 3, 16)), torch.ones((1, 2, 3, 16))
    visible = torch.zeros((1, rows, 3), dtype=torch.bool)
    out = attend(q.to(dtype), k.to(dtype), v.to(dtype), visible, SCALE)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("rows", [1, 2])
def test_what_hidden_slots_hold_does_not_matter(rows: int) -> None:
    q, k, v = torch.ones((1, rows, 4, 16)), torch.ones((1, 2, 3, 16)), torch.ones((1, 2, 3, 16))
    visible = torch.tensor([[[True, True, False]]]).expand(1, rows, 3)
    before = attend(q, k, v, visible, SCALE)
    k[:, :, 2], v[:, :, 2] = 1e4, -1e4
    torch.testing.assert_close(attend(q, k, v, visible, SCALE), before)
