"""The fast way of a conversion: straight from a payload into the reader's blocks, in one pass.

Serves what it can, bit by bit like the reference (NaN payloads aside: a NaN lands as some NaN), and says so
beforehand; without numba it serves nothing.
Shapes: B blocks, S tokens in a block, T valid tokens, H KV heads, D lanes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvpact.contract.convert import Converter, LayerWork, Payload, RotationCache
from kvpact.contract.convert_blocks import TORCH_DTYPES, view_layer
from kvpact.contract.numbers import NumberForm, key_form, loses, value_form, widens
from kvpact.errors import DataLoss
from kvpact.types import AxisOrder, ByteOrder, Dtype, LaneOrder, Packing

_KERNEL = "kvpact.contract.convert_kernel"
_SERVED = (Dtype.FLOAT32, Dtype.BFLOAT16)
_NO_ANGLES = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a layer's tokens go: the reader's storage, and the blocks of one sequence in it."""

    keys: torch.Tensor
    """[B, S, H, D] or [B, H, S, D], as the reader's axis order says; contiguous."""
    values: torch.Tensor
    blocks: npt.NDArray[np.uint64]
    """Blocks of the sequence in order."""
    first_token: int
    """Token of the sequence, counted from 0, that the first of the payload is."""


class FastConverter:
    """One pair's conversion; holds no state between calls."""

    def __init__(self, converter: Converter) -> None:
        """For pairs that `serves` allows."""
        self._land_rows = importlib.import_module(_KERNEL).land_rows
        self._converter = converter
        self._head_major = converter.reader.layout.axis_order is AxisOrder.HND

    def convert_into(
        self,
        layer: int,
        key_payload: Payload,
        value_payload: Payload,
        *,
        writer_block_start: int,
        writer_block_count: int,
        positions_T: torch.Tensor,
        rotations: RotationCache,
        destination: Destination,
    ) -> None:
        """Lands the first T tokens of some blocks of `layer`; see Converter.land.

        Raises:
            DataLoss: a payload's length isn't that of the blocks, or they can't hold T tokens.
        """
        tokens, writer = positions_T.numel(), self._converter.writer
        where = f"layer {layer}, blocks [{writer_block_start}, {writer_block_start + writer_block_count})"
        if tokens > writer_block_count * writer.layout.block_size:
            raise DataLoss(f"{where} can't hold {tokens} tokens", check="totals")
        if tokens == 0:
            return
        k_BSHD, v_BSHD = view_layer(key_payload, value_payload, writer, layer, writer_block_count, where)
        work = self._converter.work[layer]
        row = self._row(layer, work, positions_T, rotations)
        self._land(k_BSHD, destination.keys, destination, tokens, row)
        self._land(v_BSHD, destination.values, destination, tokens, _AS_IT_IS)

    def _row(self, layer: int, work: LayerWork, positions_T: torch.Tensor, rotations: RotationCache) -> _Row:
        """What happens to a row of keys."""
        ours = self._converter.writer.group_of(layer)
        to_adjacent = self._converter.reader.group_of(layer).rotary.stored_lane_order is LaneOrder.ADJACENT
        from_adjacent = to_adjacent != (work.lanes is not None)
        cos, sin = _NO_ANGLES, _NO_ANGLES
        if work.turn is not None:
            cos, sin = (factor.numpy() for factor in rotations.factors(work.turn, positions_T))
        return _Row(
            lanes=(ours.rotary.lane_offset, ours.rotary.rotary_dim // 2),
            orders=(work.turn is not None, from_adjacent, to_adjacent),
            cos=cos,
            sin=sin,
        )

    def _land(
        self, source_BSHD: torch.Tensor, storage: torch.Tensor, to: Destination, tokens: int, row: _Row
    ) -> None:
        target_BSHD = storage.transpose(1, 2) if self._head_major else storage
        _, size, heads, width = source_BSHD.shape
        strides = source_BSHD.stride()[:3], target_BSHD.stride()[:3]
        turned, from_adjacent, to_adjacent = row.orders
        if not turned and from_adjacent is to_adjacent and strides[0][2] == strides[1][2] == width:
            heads, width = 1, heads * width
        self._land_rows(
            _numbers(_whole_buffer(source_BSHD)),
            _unsigned(int(source_BSHD.storage_offset()), *strides[0], size),
            _numbers(storage.view(-1)),
            _unsigned(0, *strides[1], target_BSHD.shape[1]),
            to.blocks,
            *_unsigned(to.first_token, tokens, heads),
            _unsigned(*row.lanes, width),
            row.cos,
            row.sin,
            row.orders,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """How the numbers of one token and head become the reader's."""

    lanes: tuple[int, int]
    """First rotary lane, and pairs."""
    orders: tuple[bool, bool, bool]
    """Whether to turn, whether the writer and whether the reader keeps pairs adjacent."""
    cos: npt.NDArray[np.float32]
    """[T * pairs]."""
    sin: npt.NDArray[np.float32]


_AS_IT_IS = _Row(lanes=(0, 0), orders=(False, False, False), cos=_NO_ANGLES, sin=_NO_ANGLES)


def serves(converter: Converter, storage: torch.Tensor) -> bool:
    """Whether the fast way makes the same bits, NaN payloads aside, of this pair's blocks in `storage`."""
    writer, reader = converter.writer.layout, converter.reader.layout
    return (
        compiler_installed()
        and storage.device.type == "cpu"
        and reader.packing is Packing.SEPARATE
        and writer.shard == reader.shard
        and writer.byte_order is reader.byte_order is ByteOrder.LITTLE
        and _served(key_form(writer), key_form(reader))
        and _served(value_form(writer), value_form(reader))
    )


@functools.cache
def compiler_installed() -> bool:
    """Whether numba is there; nothing is imported."""
    return importlib.util.find_spec("numba") is not None


def warm_up() -> bool:
    """Compiles, or loads from numba's cache on disk, everything that a landing may need; False without numba.

    Takes seconds the first time on a machine; call it before a worker says that it is ready.
    """
    if not compiler_installed():
        return False
    land_rows = importlib.import_module(_KERNEL).land_rows
    for source in _SERVED:
        for target in _SERVED:
            if widens(source, target):
                _land_one_row(land_rows, TORCH_DTYPES[source], TORCH_DTYPES[target])
    return True


def _land_one_row(land_rows: Callable[..., None], source: torch.dtype, target: torch.dtype) -> None:
    """The types of a real call on four numbers."""
    numbers = [_numbers(torch.zeros(4, dtype=dtype)) for dtype in (source, target)]
    places, block = _unsigned(0, 4, 4, 4, 1), np.zeros(1, dtype=np.uint64)
    cos, sin = np.ones(2, dtype=np.float32), np.zeros(2, dtype=np.float32)
    lanes, orders = _unsigned(0, 2, 4), (True, False, False)
    land_rows(numbers[0], places, numbers[1], places, block, *_unsigned(0, 1, 1), lanes, cos, sin, orders)


def _served(writer: NumberForm, reader: NumberForm) -> bool:
    return not writer.quantized and not loses(writer, reader) and {writer.dtype, reader.dtype} <= set(_SERVED)


def _numbers(x: torch.Tensor) -> npt.NDArray[np.generic]:
    """A flat tensor's own memory for numba, which has no bfloat16."""
    return (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()


def _whole_buffer(x: torch.Tensor) -> torch.Tensor:
    """Everything that lies in `x`'s storage, flat."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _unsigned(*numbers: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(number) for number in numbers)
