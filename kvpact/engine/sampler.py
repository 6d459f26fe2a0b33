"""Picks tokens from logits. Greedy: the largest logit, the lowest id among equals."""

from __future__ import annotations

import torch


def greedy(logits_BV: torch.Tensor) -> list[int]:
    """Token id for each row of logits [B, V].

    Raises:
        ValueError: a row holds a NaN, so that no token is the largest.
    """
    if bool(logits_BV.isnan().any()):
        raise ValueError("logits hold a NaN")
    picked: list[int] = logits_BV.argmax(dim=-1).tolist()
    return picked
