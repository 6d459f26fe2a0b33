"""What a side's cache must hold, written down a second time: complex pairs in float64, blocks by loops.

Shapes: T tokens, H KV heads, D lanes; B blocks of S tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvpact.contract.contract import Contract, Layout, Rotary, RotaryTable
from kvpact.contract.convert import TORCH_DTYPES
from kvpact.types import AxisOrder, ByteOrder, KeyState, LaneOrder, Packing

JUNK = 7.0
"""What lies behind the last valid token."""


def random_THD(*, tokens: int, heads: int = 2, width: int = 16, seed: int = 0) -> torch.Tensor:
    """Normal numbers in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, heads, width), generator=generator)


def turned_THD(
    x_THD: torch.Tensor, rotary: Rotary, positions: list[int], table: RotaryTable | None = None
) -> torch.Tensor:
    """`x_THD` rotated in float64 by float32 angles, amplitude included; float64."""
    table = table or rotary.tables[0]
    x = x_THD.to(torch.float64).numpy().copy()
    angles = (np.asarray(positions, np.float32)[:, None] * np.asarray(table.inv_freq, np.float32)).astype(
        float
    )
    first, second = _pair_lanes(rotary)
    turned = (x[..., first] + 1j * x[..., second]) * (table.amplitude * np.exp(1j * angles))[:, None, :]
    x[..., first], x[..., second] = turned.real, turned.imag
    return torch.from_numpy(x)


def stored_keys(
    raw_THD: torch.Tensor, contract: Contract, positions: list[int], layer: int = 0
) -> torch.Tensor:
    """Keys as `contract` keeps them, in its dtype."""
    rotary = contract.group_of(layer).rotary
    turned = turned_THD(raw_THD, rotary, positions) if rotary.key_state is KeyState.ROTATED else raw_THD
    return turned.to(TORCH_DTYPES[contract.layout.key_dtype])


def in_lane_order(x_THD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Lanes that are given half-split, as `rotary` stores them."""
    half = replace(rotary, stored_lane_order=LaneOrder.HALF_SPLIT)
    out = x_THD.clone()
    for own, given in zip(_pair_lanes(rotary), _pair_lanes(half), strict=True):
        out[..., own] = x_THD[..., given]
    return out


def pack_layer(k_THD: torch.Tensor, v_THD: torch.Tensor, layout: Layout) -> tuple[bytes, bytes]:
    """Keys and values of one layer as any layout stores them, number by number."""
    numbers = [_in_byte_order(pack(x, layout), x.element_size(), layout) for x in (k_THD, v_THD)]
    if layout.packing is Packing.SEPARATE:
        return numbers[0], numbers[1]
    blocks = -(-len(k_THD) // layout.block_size)
    sizes = [len(part) // blocks for part in numbers]
    pieces = [
        part[b * size : (b + 1) * size]
        for b in range(blocks)
        for part, size in zip(numbers, sizes, strict=True)
    ]
    return b"".join(pieces), b""


def _in_byte_order(data: bytes, number_bytes: int, layout: Layout) -> bytes:
    if layout.byte_order is ByteOrder.LITTLE:
        return data
    return b"".join(data[i : i + number_bytes][::-1] for i in range(0, len(data), number_bytes))


def pack(x_THD: torch.Tensor, layout: Layout) -> bytes:
    """Stored blocks as bytes, junk behind the last token."""
    tokens, heads, width = x_THD.shape
    size = layout.block_size
    blocks = -(-tokens // size)
    nhd = layout.axis_order is AxisOrder.NHD
    out = torch.full(
        (blocks, size, heads, width) if nhd else (blocks, heads, size, width), JUNK, dtype=x_THD.dtype
    )
    for token in range(tokens):
        block, slot = divmod(token, size)
        if nhd:
            out[block, slot] = x_THD[token]
        else:
            out[block, :, slot] = x_THD[token]
    return out.reshape(-1).view(torch.uint8).numpy().tobytes()


def pair_norms(x_THD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """For each lane the norm of the rotary pair that it belongs to, else its own magnitude; float64."""
    x = x_THD.to(torch.float64)
    norms = x.abs().clone()
    first, second = _pair_lanes(rotary)
    norms[..., first] = norms[..., second] = torch.hypot(x[..., first], x[..., second])
    return norms


def logits_of(q_HD: torch.Tensor, k_THD: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention logits [T, H] of one query against all keys, in float64."""
    return (k_THD.to(torch.float64) * q_HD.to(torch.float64)).sum(-1) * scale


def attend(q_HD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention of one query over all keys, [H, D] in float64."""
    weights_TH = logits_of(q_HD, k_THD, scale).softmax(0)
    return (weights_TH[..., None] * v_THD.to(torch.float64)).sum(0)


def _pair_lanes(rotary: Rotary) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    half = rotary.rotary_dim // 2
    lanes = np.arange(half)
    if rotary.stored_lane_order is LaneOrder.HALF_SPLIT:
        return rotary.lane_offset + lanes, rotary.lane_offset + lanes + half
    return rotary.lane_offset + 2 * lanes, rotary.lane_offset + 2 * lanes + 1
