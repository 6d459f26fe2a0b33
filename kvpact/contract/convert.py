"""Runs a plan on landing: a writer's stored blocks of one layer to keys and values as the reader keeps them.

Shapes: B blocks, S tokens in a block, T valid tokens, H KV heads, D lanes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvpact.contract.contract import Contract, LayerGroup, Layout, Rotary
from kvpact.contract.plan import turn_between
from kvpact.contract.rotation import Rotation, rotate, rotation_at, unrotate
from kvpact.contract.tables import table_at
from kvpact.errors import DataLoss
from kvpact.types import DTYPE_BYTES, AxisOrder, Dtype, FrequencyPolicy, LayerKind, PlanOp

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


class RotationCache:
    """Angles of one handoff, computed once per rotary part and positions and shared by its layers.

    Lives as long as the handoff; used by one thread at a time. `table_length` picks the table where a policy
    has several; None serves frozen tables only.
    """

    def __init__(self, *, table_length: int | None = None) -> None:
        self._table_length = table_length
        self._rotations: dict[tuple[Rotary, int, bytes], Rotation] = {}

    def rotation(self, rotary: Rotary, context_tokens: int, positions_T: torch.Tensor) -> Rotation:
        """Angles at integer positions [T] by the table of `rotary` on a side serving `context_tokens`."""
        key = (rotary, context_tokens, positions_T.cpu().numpy().tobytes())
        if key not in self._rotations:
            length = context_tokens if self._table_length is None else self._table_length
            assert self._table_length is not None or rotary.frequency_policy is FrequencyPolicy.FROZEN
            table = table_at(rotary, length=length, context_tokens=context_tokens)
            assert table is not None, "a pair without numbers for this length is refused when it is compared"
            self._rotations[key] = rotation_at(rotary, table, positions_T)
        return self._rotations[key]


class Converter:
    """Turns blocks of one pair whose verdict was accept or convert. Holds no state between calls."""

    def __init__(self, writer: Contract, reader: Contract) -> None:
        assert writer.layout.key_dtype is reader.layout.key_dtype, (
            "another dtype is refused when it is compared"
        )
        assert writer.layout.value_dtype is reader.layout.value_dtype
        self.writer = writer
        self.reader = reader
        self._groups = {layer: group for group in writer.layer_groups for layer in group.layers}
        self._turns = {layer: _turn(writer, reader, layer) for layer in self._groups}

    def convert(
        self,
        layer: int,
        key_payload: Payload,
        value_payload: Payload,
        *,
        writer_block_start: int,
        writer_block_count: int,
        positions_T: torch.Tensor,
        rotations: RotationCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [T, H, D], of the first T tokens of blocks [start, start + count) of `layer`.

        Keys come in the reader's key_state. `positions_T` are the integer positions of the valid tokens in
        these blocks; whatever lies behind them is dropped. The result may be a view of the payloads: copy it
        before they go.

        Raises:
            DataLoss: a payload's length isn't that of the blocks, or they can't hold T tokens.
        """
        group, layout = self._groups[layer], self.writer.layout
        tokens, turn = positions_T.numel(), self._turns[layer]
        where = f"layer {layer}, blocks [{writer_block_start}, {writer_block_start + writer_block_count})"
        if tokens > writer_block_count * layout.block_size:
            raise DataLoss(f"{where} can't hold {tokens} tokens", check="totals")
        heads = _stored_heads(group, layout)
        keys = BlockShape(blocks=writer_block_count, heads=heads, width=group.key_dim)
        values = BlockShape(blocks=writer_block_count, heads=heads, width=group.value_dim)
        k_THD = _first_tokens(
            view_blocks(key_payload, layout, layout.key_dtype, keys, f"keys of {where}"), tokens
        )
        v_THD = _first_tokens(
            view_blocks(value_payload, layout, layout.value_dtype, values, f"values of {where}"), tokens
        )
        if turn is None:
            return k_THD, v_THD
        rotation = rotations.rotation(turn.rotary, turn.context_tokens, positions_T)
        return turn.run(k_THD, rotation), v_THD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What a layer's keys need: `run` at the angles of one side's rotary part."""

    run: Callable[[torch.Tensor, Rotation], torch.Tensor]
    rotary: Rotary
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes of some blocks of one layer's keys or values that the layout doesn't hold."""

    blocks: int
    heads: int
    width: int


def view_blocks(payload: Payload, layout: Layout, dtype: Dtype, shape: BlockShape, what: str) -> torch.Tensor:
    """The payload as [B, S, H, D], whatever the axis order; a view, never to be written to.

    Raises:
        DataLoss: the payload's length is another.
    """
    blocks, size, heads, width = shape.blocks, layout.block_size, shape.heads, shape.width
    expected = blocks * size * heads * width * DTYPE_BYTES[dtype]
    found = memoryview(payload).nbytes
    if found != expected:
        raise DataLoss(f"{what}: found {found} bytes, expected {expected}", check="totals")
    if expected == 0:
        return torch.empty((blocks, size, heads, width), dtype=TORCH_DTYPES[dtype])
    numbers = torch.frombuffer(payload, dtype=torch.uint8).view(TORCH_DTYPES[dtype])
    if layout.axis_order is AxisOrder.NHD:
        return numbers.view(blocks, size, heads, width)
    return numbers.view(blocks, heads, size, width).transpose(1, 2)


def _first_tokens(x_BSHD: torch.Tensor, tokens: int) -> torch.Tensor:
    return x_BSHD.reshape(-1, *x_BSHD.shape[2:])[:tokens]


def _stored_heads(group: LayerGroup, layout: Layout) -> int:
    if group.kind is LayerKind.MLA_LATENT:
        return 1
    return layout.shard.head_end - layout.shard.head_start


def _turn(writer: Contract, reader: Contract, layer: int) -> _Turn | None:
    ours, theirs = writer.group_of(layer).rotary, reader.group_of(layer).rotary
    op = turn_between(ours, theirs)
    if op is None:
        return None
    if op is PlanOp.ROTATE:
        return _Turn(run=rotate, rotary=theirs, context_tokens=reader.model.context_tokens)
    return _Turn(run=unrotate, rotary=ours, context_tokens=writer.model.context_tokens)
