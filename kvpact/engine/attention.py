"""Attention of one layer over the paged cache, and the one place of the engine where q and k are rotated.

Legend: T rows of the step, B sequences attended together, t rows of each, n keys, H kv heads,
Q = H * G query heads, D lanes, r = G * t folded rows. Query heads that share a kv head are folded
into rows, so keys and values are never multiplied out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvpact.contract.contract import LayerGroup
from kvpact.contract.rotation import Rotation, rotate
from kvpact.engine.trace import Attended, Recorder
from kvpact.engine.witness_tap import AttendedRows, WitnessTap
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import KeyState, LaneOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Sequences with the same number of new rows, attended in one product."""

    query_rows_Bt: torch.Tensor
    first_rows: tuple[int, ...]
    """First of each sequence's rows in the step; the others follow it."""
    key_rows_BHn: torch.Tensor
    visible_Btn: torch.Tensor
    key_rotation: Rotation | None
    """Angles [B, 1, n, R / 2] to lay on keys as they are read; None if they need none."""
    recorders: tuple[Recorder | None, ...]
    taps: tuple[WitnessTap | None, ...]
    query_positions_Bt: torch.Tensor
    key_positions: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """What the layers of one group share in one step."""

    group: LayerGroup
    rotation: Rotation | None
    """Angles of the step's rows; None for layers without rotary embedding."""
    write_rows_HT: torch.Tensor
    written_T: torch.Tensor | None
    """Rows of the step that are written into the cache, where not all are: others lie in it already."""
    bundles: tuple[Bundle, ...]


def attend_layer(
    cache: PagedCache,
    layer: int,
    step: GroupStep,
    q_TQD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
) -> torch.Tensor:
    """Rotates raw q and k, stores k in the contract's form and v, and attends: [T, Q, D], dtype of q."""
    q_TQD, k_THD = _to_stored_lanes(step.group, q_TQD), _to_stored_lanes(step.group, k_THD)
    q_TQD, rotated_THD = _rotate_both(step.rotation, q_TQD, k_THD)
    keeps_raw = step.group.rotary.key_state is KeyState.RAW
    stored_THD, values_THD = k_THD if keeps_raw else rotated_THD, v_THD
    if step.written_T is not None:
        stored_THD, values_THD = stored_THD[step.written_T], v_THD[step.written_T]
    cache.put(layer, step.write_rows_HT, stored_THD, values_THD)
    out_TQD = q_TQD.new_empty((*q_TQD.shape[:2], v_THD.shape[-1]))
    for bundle in step.bundles:
        k_BHnD = cache.keys_at(layer, bundle.key_rows_BHn).to(q_TQD.dtype)
        if bundle.key_rotation is not None:
            k_BHnD = rotate(k_BHnD, bundle.key_rotation)
        v_BHnD = cache.values_at(layer, bundle.key_rows_BHn).to(q_TQD.dtype)
        q_BtQD = q_TQD[bundle.query_rows_Bt]
        out_BtQD = attend(q_BtQD, k_BHnD, v_BHnD, bundle.visible_Btn, step.group.softmax_scale)
        _tell(bundle, layer, (q_BtQD, k_BHnD, v_BHnD, out_BtQD), step.group.softmax_scale)
        _tap(bundle, layer, k_THD, v_THD, k_BHnD)
        out_TQD[bundle.query_rows_Bt] = out_BtQD
    return out_TQD


def attend(
    q_BtQD: torch.Tensor, k_BHnD: torch.Tensor, v_BHnD: torch.Tensor, visible_Btn: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of rotated q over rotated k where `visible`: [B, t, Q, D]; without any key 0."""
    rows, heads = q_BtQD.shape[1], k_BHnD.shape[1]
    groups = q_BtQD.shape[2] // heads
    q_BHrD = q_BtQD.unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    visible_B1rn = visible_Btn[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    if rows == 1:
        out_BHrD = _two_products(q_BHrD, k_BHnD, v_BHnD, visible_B1rn, scale)
    else:
        out_BHrD = F.scaled_dot_product_attention(q_BHrD, k_BHnD, v_BHnD, attn_mask=visible_B1rn, scale=scale)
    out_BtHGD: torch.Tensor = out_BHrD.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4)
    return out_BtHGD.flatten(2, 3)


def _two_products(
    q_BHrD: torch.Tensor, k_BHnD: torch.Tensor, v_BHnD: torch.Tensor, visible_B1rn: torch.Tensor, scale: float
) -> torch.Tensor:
    scores_BHrn = torch.matmul(q_BHrD, k_BHnD.transpose(2, 3)).float() * scale
    scores_BHrn.masked_fill_(~visible_B1rn, -torch.inf)
    weights_BHrn = scores_BHrn.softmax(dim=-1).masked_fill_(~visible_B1rn, 0.0)
    return torch.matmul(weights_BHrn.to(v_BHnD.dtype), v_BHnD)


def _rotate_both(
    rotation: Rotation | None, q_TQD: torch.Tensor, k_THD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the same tokens turn by the same angles, so they turn together."""
    if rotation is None:
        return q_TQD, k_THD
    both = rotate(torch.cat((q_TQD, k_THD), dim=1), rotation)
    return both[:, : q_TQD.shape[1]], both[:, q_TQD.shape[1] :]


def _to_stored_lanes(group: LayerGroup, x_THD: torch.Tensor) -> torch.Tensor:
    """Models hand over half-split lanes; the same permutation of q and k leaves their product as it is."""
    rotary = group.rotary
    if rotary.stored_lane_order is LaneOrder.HALF_SPLIT or rotary.rotary_dim == 0:
        return x_THD
    start, end = rotary.lane_offset, rotary.lane_offset + rotary.rotary_dim
    lanes = x_THD[..., start:end].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((x_THD[..., :start], lanes, x_THD[..., end:]), dim=-1)


def _tell(bundle: Bundle, layer: int, attended: tuple[torch.Tensor, ...], scale: float) -> None:
    """Tells recorders of queries, keys, values and output."""
    q_BtQD, k_BHnD, v_BHnD, out_BtQD = attended
    for row, recorder in enumerate(bundle.recorders):
        if recorder is None:
            continue
        key_positions_n = bundle.key_positions[row]
        recorder.record(
            Attended(
                layer=layer,
                query_positions_T=bundle.query_positions_Bt[row],
                q_TQD=q_BtQD[row],
                key_positions_n=key_positions_n,
                k_nHD=k_BHnD[row, :, : key_positions_n.numel()].transpose(0, 1),
                v_nHD=v_BHnD[row, :, : key_positions_n.numel()].transpose(0, 1),
                out_TQD=out_BtQD[row],
                scale=scale,
            )
        )


def _tap(bundle: Bundle, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor, k_BHnD: torch.Tensor) -> None:
    for row, tap in enumerate(bundle.taps):
        if tap is None:
            continue
        start, count = bundle.first_rows[row], bundle.query_rows_Bt.shape[1]
        rows = AttendedRows(
            first=bundle.key_positions[row].numel() - count,
            k_tHD=k_THD[start : start + count],
            v_tHD=v_THD[start : start + count],
            k_HnD=k_BHnD[row],
        )
        tap.take(layer, rows)
