"""The only place where an angle touches a key or a query; convert_kernel.py is its compiled twin on landing.

Shapes: T tokens, H heads, D head width, R rotary width. Positions are integers; the angle of pair i at
position p is float32(p) * float32(inv_freq_i), and cos and sin are taken in float32 (RoFormer, section
3.2). An amplitude multiplies cos and sin on the way in and is divided out on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpact.contract.contract import Rotary, RotaryTable
from kvpact.errors import BadRequest
from kvpact.types import Basis, FrequencyPolicy, KeyState, LaneOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Angles of T tokens of one layer group. `cos` and `sin` are float32 [T, 1, R / 2], without amplitude."""

    cos: torch.Tensor
    sin: torch.Tensor
    amplitude: float
    lane_offset: int
    rotary_dim: int
    lane_order: LaneOrder


def rotation_at(rotary: Rotary, table: RotaryTable, positions_T: torch.Tensor) -> Rotation:
    """Angles for integer positions [T]; lanes pair as `rotary.stored_lane_order` says.

    Raises:
        TypeError: positions are not integers.
    """
    return _rotation(rotary, _angles(table, positions_T), table.amplitude)


def lane_permutation(rotary: Rotary, order: LaneOrder, width: int) -> tuple[int, ...] | None:
    """The lane of `rotary`'s stored order that becomes each lane of `order`, [width]; None if none moves."""
    if rotary.stored_lane_order is order or rotary.rotary_dim <= 2:
        return None
    start, half = rotary.lane_offset, rotary.rotary_dim // 2
    turned = range(rotary.rotary_dim)
    if order is LaneOrder.HALF_SPLIT:
        sources = [2 * (lane % half) + lane // half for lane in turned]
    else:
        sources = [lane // 2 + half * (lane % 2) for lane in turned]
    behind = range(start + rotary.rotary_dim, width)
    return (*range(start), *(start + source for source in sources), *behind)


def rotate(x_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Raw [T, H, D] to rotated, in float32, given back in the dtype of `x_THD`. Other lanes are untouched."""
    return _turn(x_THD, rotation, *rotating(rotation))


def unrotate(x_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotated [T, H, D] to raw: the inverse of `rotate`, amplitude divided out."""
    return _turn(x_THD, rotation, *unrotating(rotation))


def rotating(rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors c and s, [T, 1, R / 2], of `rotate`: a pair (a, b) becomes (a c - b s, b c + a s)."""
    return rotation.cos * rotation.amplitude, rotation.sin * rotation.amplitude


def unrotating(rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of `unrotate`, as those of `rotating`."""
    return rotation.cos / rotation.amplitude, -rotation.sin / rotation.amplitude


def rebase(x_THD: torch.Tensor, rotary: Rotary, positions_T: torch.Tensor, shift: int) -> torch.Tensor:
    """Keys stored for integer positions [T], as they would be stored for positions + shift.

    For experiments: values and deeper layers' keys still come from the old context, so the result is an
    approximation of a prefill there. The amplitude that rotated keys carry stays as it is; raw keys and keys
    without rotation hold no position and come back as they are.

    Raises:
        BadRequest: each length has a table of its own, positions have several rows, the keys are in another
            basis, or a position would be negative.
    """
    if rotary.key_state is not KeyState.ROTATED:
        return x_THD
    _check_turnable(rotary)
    if rotary.frequency_policy is not FrequencyPolicy.FROZEN or len(rotary.tables) != 1:
        raise BadRequest(
            f"keys under frequency_policy {rotary.frequency_policy} can't be moved: the table at the new "
            "length may be another",
            param="frequency_policy",
        )
    moved_T = positions_T + shift
    if moved_T.numel() and int(moved_T.min()) < 0:
        raise BadRequest(f"position {int(moved_T.min())} after a shift of {shift}", param="shift")
    (table,) = rotary.tables
    return _turn_between(x_THD, rotary, _angles(table, positions_T), _angles(table, moved_T), 1.0)


def rephase(
    x_THD: torch.Tensor, rotary: Rotary, old: RotaryTable, new: RotaryTable, positions_T: torch.Tensor
) -> torch.Tensor:
    """Keys rotated by table `old` at integer positions [T], as if table `new` had rotated them.

    For experiments: in a network of several layers the keys themselves come from states that `old` made, and
    stay so. The amplitude of `old` is exchanged for that of `new`.

    Raises:
        BadRequest: positions have several rows, or the keys are in another basis.
    """
    if rotary.key_state is not KeyState.ROTATED:
        return x_THD
    _check_turnable(rotary)
    ratio = new.amplitude / old.amplitude
    return _turn_between(x_THD, rotary, _angles(old, positions_T), _angles(new, positions_T), ratio)


def _angles(table: RotaryTable, positions_T: torch.Tensor) -> torch.Tensor:
    """Canonical angles in float32, [T, R / 2]."""
    if positions_T.is_floating_point():
        raise TypeError(f"positions must be integers, found {positions_T.dtype}")
    inv_freq_R = torch.tensor(table.inv_freq, dtype=torch.float32, device=positions_T.device)
    return positions_T.to(torch.float32)[:, None] * inv_freq_R[None, :]


def _rotation(rotary: Rotary, angle_TR: torch.Tensor, amplitude: float) -> Rotation:
    assert rotary.key_state is not KeyState.NONE
    return Rotation(
        cos=angle_TR.cos().to(torch.float32)[:, None, :],
        sin=angle_TR.sin().to(torch.float32)[:, None, :],
        amplitude=amplitude,
        lane_offset=rotary.lane_offset,
        rotary_dim=rotary.rotary_dim,
        lane_order=rotary.stored_lane_order,
    )


def _turn_between(
    x_THD: torch.Tensor, rotary: Rotary, old_TR: torch.Tensor, new_TR: torch.Tensor, factor: float
) -> torch.Tensor:
    """Keys at the old angles turned to the new ones: by the difference, taken in float64."""
    return rotate(x_THD, _rotation(rotary, new_TR.to(torch.float64) - old_TR.to(torch.float64), factor))


def _check_turnable(rotary: Rotary) -> None:
    if rotary.mrope_sections:
        raise BadRequest("keys with several position rows can't be turned", param="mrope_sections")
    if rotary.basis is not Basis.IDENTITY:
        raise BadRequest(f"keys in the {rotary.basis} basis can't be turned", param="basis")


def _turn(x_THD: torch.Tensor, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    start, end = rotation.lane_offset, rotation.lane_offset + rotation.rotary_dim
    lanes = x_THD[..., start:end].to(torch.float32)
    if rotation.lane_order is LaneOrder.HALF_SPLIT:
        first, second = lanes.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = lanes[..., 0::2], lanes[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    if rotation.rotary_dim == x_THD.shape[-1]:
        return turned.to(x_THD.dtype)
    out = x_THD.clone()
    out[..., start:end] = turned.to(x_THD.dtype)
    return out
