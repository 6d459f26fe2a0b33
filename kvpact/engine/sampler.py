"""Picks tokens from logits. Greedy: the largest logit, the lowest id among equals."""

from __future__ import annotations

import torch


def greedy(logits_BV: torch.Tensor) -> list[int | None]:
    """Token id for each row of logits [B, V]; None for a row with a NaN, in which no token is the largest."""
    picked: list[int] = logits_BV.argmax(dim=-1).tolist()
    broken: list[bool] = logits_BV.isnan().any(dim=-1).tolist()
    return [None if bad else token for token, bad in zip(picked, broken, strict=True)]
