"""What attention saw, recorded layer by layer, and where two recordings first part.

Legend: T query rows, n keys, Q query heads, H kv heads, D lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """One attention of one sequence in one layer: queries and keys after rotation, as multiplied.

    Lanes of queries and keys lie in the stored order of whoever attends.
    """

    layer: int
    query_positions_T: torch.Tensor
    q_TQD: torch.Tensor
    key_positions_n: torch.Tensor
    k_nHD: torch.Tensor
    v_nHD: torch.Tensor
    out_TQD: torch.Tensor
    """Attention output, before the output projection."""
    scale: float


class Recorder(Protocol):
    """Someone who is told of attention as it happens."""

    def record(self, attended: Attended) -> None:
        """Called once per layer and forward, on the computing thread; tensors must be copied to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first attention logit on which two recordings differ: lowest layer, then lowest query position."""

    layer: int
    position: int
    head: int
    key_position: int
    reference: float
    found: float


class LogitRecorder:
    """Keeps attention logits [Q, n] (scaled, before softmax) per layer and query position.

    `positions` limits what is kept; None keeps every row, which is quadratic in the prompt.
    """

    def __init__(self, positions: frozenset[int] | None = None) -> None:
        self.positions = positions
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def record(self, attended: Attended) -> None:
        """Computes and keeps the logits of wanted rows over the keys up to each, in order of position."""
        order = attended.key_positions_n.argsort()
        key_positions_n = attended.key_positions_n[order]
        k_nHD = attended.k_nHD[order].float()
        groups = attended.q_TQD.shape[1] // k_nHD.shape[1]
        for row, position in enumerate(attended.query_positions_T.tolist()):
            if self.positions is not None and position not in self.positions:
                continue
            seen = int((key_positions_n <= position).sum())
            q_HGD = attended.q_TQD[row].float().unflatten(0, (-1, groups))
            logits_HGn = torch.einsum("hgd,nhd->hgn", q_HGD, k_nHD[:seen]) * attended.scale
            self.logits[attended.layer, position] = logits_HGn.flatten(0, 1).cpu()


class StateRecorder(LogitRecorder):
    """Keeps logits and attention outputs [Q, D] of wanted rows, and keys and values [n, H, D] of each layer.

    Keys and values are those of the layer's last attention, in order of position, in float32 on the CPU.
    """

    def __init__(self, positions: frozenset[int] | None = None) -> None:
        super().__init__(positions)
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def record(self, attended: Attended) -> None:
        """Copies what is wanted."""
        super().record(attended)
        order = attended.key_positions_n.argsort()
        self.keys[attended.layer] = attended.k_nHD[order].float().cpu()
        self.values[attended.layer] = attended.v_nHD[order].float().cpu()
        for row, position in enumerate(attended.query_positions_T.tolist()):
            if self.positions is None or position in self.positions:
                self.outputs[attended.layer, position] = attended.out_TQD[row].float().cpu().clone()


class QueryKeyRecorder:
    """Keeps queries [T, Q, D] and keys [n, H, D] of the last attention of each layer, in float32."""

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}

    def record(self, attended: Attended) -> None:
        """Copies queries and keys."""
        self.queries[attended.layer] = attended.q_TQD.detach().float().clone()
        self.keys[attended.layer] = attended.k_nHD.detach().float().clone()


def first_divergence(reference: LogitRecorder, found: LogitRecorder, tolerance: float) -> Divergence | None:
    """The first row of `found`, by layer and then position, that is off `reference` by more than `tolerance`.

    A row counts only if both recorded it; one of another length, or with a NaN, diverges. Inside a row the
    largest difference is named; its key position is right where positions run from 0 without a gap.
    """
    for layer, position in sorted(reference.logits.keys() & found.logits.keys()):
        expected_Qn, seen_Qn = reference.logits[layer, position], found.logits[layer, position]
        count = min(expected_Qn.shape[1], seen_Qn.shape[1])
        gap_Qn = (expected_Qn[:, :count] - seen_Qn[:, :count]).abs().nan_to_num(nan=torch.inf)
        if expected_Qn.shape == seen_Qn.shape and float(gap_Qn.max()) <= tolerance:
            continue
        off_n = (gap_Qn > tolerance).any(dim=0)
        key = int(off_n.int().argmax()) if off_n.any() else count - 1
        head = int(gap_Qn[:, key].argmax())
        return Divergence(
            layer=layer,
            position=position,
            head=head,
            key_position=key,
            reference=float(expected_Qn[head, key]),
            found=float(seen_Qn[head, key]),
        )
    return None
