"""Blocks as bytes and as tensors: views of what a writer stored, bytes of what a reader stores.

Shapes: B blocks, S tokens in a block, T valid tokens, H KV heads of a shard, D lanes. In packed blocks each
block's keys are followed by its values; the whole is then the keys' payload, and the values' is empty.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvpact.contract.contract import Contract, Layout
from kvpact.contract.numbers import DTYPE_BYTES
from kvpact.contract.shards import held_heads
from kvpact.errors import DataLoss
from kvpact.types import AxisOrder, ByteOrder, Dtype, Packing

Payload: TypeAlias = bytes | bytearray | memoryview

TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT8_E4M3: torch.float8_e4m3fn,
    Dtype.FLOAT8_E5M2: torch.float8_e5m2,
    Dtype.INT8: torch.int8,
}

with warnings.catch_warnings():
    # Payloads are read-only views, and nothing here writes to them; torch says so once per process.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes of some blocks of one layer's keys or values that the layout doesn't hold."""

    blocks: int
    heads: int
    width: int

    def bytes_each(self, layout: Layout, dtype: Dtype) -> int:
        """Bytes of one block."""
        return layout.block_size * self.heads * self.width * DTYPE_BYTES[dtype]


def block_shapes(contract: Contract, layer: int, blocks: int) -> tuple[BlockShape, BlockShape]:
    """Shapes of keys and values that `contract` stores of `layer` in `blocks` blocks."""
    group = contract.group_of(layer)
    heads = len(held_heads(group, contract))
    return (
        BlockShape(blocks=blocks, heads=heads, width=group.key_dim),
        BlockShape(blocks=blocks, heads=heads, width=group.value_dim),
    )


def view_layer(
    keys: Payload, values: Payload, contract: Contract, layer: int, blocks: int, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `layer` as [B, S, H, D] each, whatever the layout; never to be written to.

    Raises:
        DataLoss: a payload's length is another.
    """
    layout = contract.layout
    k_shape, v_shape = block_shapes(contract, layer, blocks)
    if layout.packing is Packing.SEPARATE:
        return (
            view_blocks(keys, layout, layout.key_dtype, k_shape, f"keys of {where}"),
            view_blocks(values, layout, layout.value_dtype, v_shape, f"values of {where}"),
        )
    k_bytes = k_shape.bytes_each(layout, layout.key_dtype)
    v_bytes = v_shape.bytes_each(layout, layout.value_dtype)
    _check_length(keys, blocks * (k_bytes + v_bytes), f"packed blocks of {where}")
    _check_length(values, 0, f"values beside packed blocks of {where}")
    packed = _octets(keys).view(blocks, k_bytes + v_bytes)
    return (
        _arranged(packed[:, :k_bytes], layout, layout.key_dtype, k_shape),
        _arranged(packed[:, k_bytes:], layout, layout.value_dtype, v_shape),
    )


def view_blocks(payload: Payload, layout: Layout, dtype: Dtype, shape: BlockShape, what: str) -> torch.Tensor:
    """The payload as [B, S, H, D], whatever the axis order; a view where the byte order is little.

    Raises:
        DataLoss: the payload's length is another.
    """
    each = shape.bytes_each(layout, dtype)
    _check_length(payload, shape.blocks * each, what)
    return _arranged(_octets(payload).view(shape.blocks, each), layout, dtype, shape)


def first_tokens(x_BSHD: torch.Tensor, tokens: int) -> torch.Tensor:
    """[T, H, D] of the first T tokens."""
    return x_BSHD.reshape(-1, *x_BSHD.shape[2:])[:tokens]


def layer_bytes(k_THD: torch.Tensor, v_THD: torch.Tensor, layout: Layout) -> tuple[bytes, bytes]:
    """Keys and values, in the layout's dtypes, as its blocks; slots behind the last token are zero."""
    keys, values = _blocks_as_octets(k_THD, layout), _blocks_as_octets(v_THD, layout)
    if layout.packing is Packing.PACKED:
        return torch.cat((keys, values), dim=1).numpy().tobytes(), b""
    return keys.numpy().tobytes(), values.numpy().tobytes()


def as_octets(x: torch.Tensor) -> torch.Tensor:
    """`x` as bytes, [..., D * bytes of a number]; eight-bit formats have few operations of their own."""
    return x.contiguous().view(torch.uint8)


def _blocks_as_octets(x_THD: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[B, bytes of a block]."""
    tokens, heads, width = x_THD.shape
    size = layout.block_size
    blocks = -(-tokens // size)
    octets = as_octets(x_THD)
    padded = octets.new_zeros((blocks * size, heads, octets.shape[-1]))
    padded[:tokens] = octets
    if layout.byte_order is ByteOrder.BIG:
        padded = padded.view(blocks * size, heads, width, -1).flip(-1)
    padded = padded.reshape(blocks, size, heads, -1)
    if layout.axis_order is AxisOrder.HND:
        padded = padded.transpose(1, 2)
    return padded.reshape(blocks, -1)


def _arranged(octets_BX: torch.Tensor, layout: Layout, dtype: Dtype, shape: BlockShape) -> torch.Tensor:
    size, heads, width = layout.block_size, shape.heads, shape.width
    number_bytes = DTYPE_BYTES[dtype]
    if octets_BX.numel() == 0:
        return torch.empty((shape.blocks, size, heads, width), dtype=TORCH_DTYPES[dtype])
    if layout.byte_order is ByteOrder.BIG:
        octets_BX = octets_BX.reshape(shape.blocks, -1, number_bytes).flip(-1).reshape(shape.blocks, -1)
    starts = (octets_BX.storage_offset(), octets_BX.stride(0))
    if any(start % number_bytes for start in starts):
        # One block counts as contiguous wherever it starts and whatever its stride, so contiguous() won't do.
        octets_BX = octets_BX.clone(memory_format=torch.contiguous_format)
    numbers = octets_BX.view(TORCH_DTYPES[dtype])
    if layout.axis_order is AxisOrder.NHD:
        return numbers.view(shape.blocks, size, heads, width)
    return numbers.view(shape.blocks, heads, size, width).transpose(1, 2)


def _octets(payload: Payload) -> torch.Tensor:
    if memoryview(payload).nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(payload, dtype=torch.uint8)


def _check_length(payload: Payload, expected: int, what: str) -> None:
    found = memoryview(payload).nbytes
    if found != expected:
        raise DataLoss(f"{what}: found {found} bytes, expected {expected}", check="totals")
