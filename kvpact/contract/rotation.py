"""The only place where an angle touches a key or a query.

Shapes: T tokens, H heads, D head width, R rotary width. Positions are integers; the angle of pair i at
position p is float32(p) * float32(inv_freq_i), and cos and sin are taken in float32 (RoFormer, section
3.2). An amplitude multiplies cos and sin on the way in and is divided out on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpact.contract.contract import Rotary, RotaryTable
from kvpact.types import KeyState, LaneOrder


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
    if positions_T.is_floating_point():
        raise TypeError(f"positions must be integers, found {positions_T.dtype}")
    assert rotary.key_state is not KeyState.NONE
    inv_freq_R = torch.tensor(table.inv_freq, dtype=torch.float32, device=positions_T.device)
    angle_TR = positions_T.to(torch.float32)[:, None] * inv_freq_R[None, :]
    return Rotation(
        cos=angle_TR.cos()[:, None, :],
        sin=angle_TR.sin()[:, None, :],
        amplitude=table.amplitude,
        lane_offset=rotary.lane_offset,
        rotary_dim=rotary.rotary_dim,
        lane_order=rotary.stored_lane_order,
    )


def rotate(x_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Raw [T, H, D] to rotated, in float32, given back in the dtype of `x_THD`. Other lanes are untouched."""
    return _turn(x_THD, rotation, rotation.cos * rotation.amplitude, rotation.sin * rotation.amplitude)


def unrotate(x_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotated [T, H, D] to raw: the inverse of `rotate`, amplitude divided out."""
    return _turn(x_THD, rotation, rotation.cos / rotation.amplitude, -rotation.sin / rotation.amplitude)


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
