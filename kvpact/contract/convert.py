"""Runs a plan on landing: a writer's stored blocks of one layer to keys and values as the reader keeps them.

This is the reference; a faster way to the same bits, NaN payloads aside, is in convert_fast.
Shapes: T tokens, H KV heads, D lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvpact.contract.contract import Contract, Rotary
from kvpact.contract.convert_blocks import TORCH_DTYPES, Payload, as_octets, first_tokens, view_layer
from kvpact.contract.convert_numbers import (
    ScalePlace,
    fitting_scales,
    real_numbers,
    require_finite,
    scales_of,
    stored_numbers,
)
from kvpact.contract.numbers import NumberForm, key_form, loses, value_form
from kvpact.contract.plan import made_anew, turn_between, turn_bound
from kvpact.contract.rotation import (
    Rotation,
    lane_permutation,
    rotate,
    rotating,
    rotation_at,
    unrotate,
    unrotating,
)
from kvpact.contract.tables import table_at
from kvpact.errors import DataLoss
from kvpact.types import FrequencyPolicy, KeyState, PlanOp

__all__ = ["TORCH_DTYPES", "Converter", "Landed", "LayerWork", "Payload", "RotationCache", "Turn"]


class RotationCache:
    """Angles of one handoff, computed once per rotary part and positions and shared by its layers.

    Lives as long as the handoff; used by one thread at a time. `table_length` picks the table where a policy
    has several; None serves frozen tables only.
    """

    def __init__(self, *, table_length: int | None = None) -> None:
        self._table_length = table_length
        self._rotations: dict[tuple[Rotary, int, bytes], Rotation] = {}
        self._factors: dict[tuple[int, PlanOp], tuple[Rotation, torch.Tensor, torch.Tensor]] = {}

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

    def factors(self, turn: Turn, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat cos and sin, float32 [T * R / 2], that a turn multiplies lanes with."""
        rotation = self.rotation(turn.rotary, turn.context_tokens, positions_T)
        key = (id(rotation), turn.op)
        if key not in self._factors:
            turned = rotating(rotation) if turn.op is PlanOp.ROTATE else unrotating(rotation)
            cos, sin = (factor.contiguous().view(-1) for factor in turned)
            self._factors[key] = rotation, cos, sin
        return self._factors[key][1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a layer's keys need: `run` at the angles of one side's rotary part, lanes in reader's order."""

    op: PlanOp
    run: Callable[[torch.Tensor, Rotation], torch.Tensor]
    rotary: Rotary
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What one layer's keys need: a turn, and lanes in another order."""

    turn: Turn | None
    lanes: tuple[int, ...] | None
    """The writer's lane that becomes each of the reader's; None: they lie alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """Keys and values [T, H, D] as the reader stores them, with its scales where it has any."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    """Float32 [1 or T, 1 or H, 1]; picked from these tokens where the reader's scales are shipped ones."""
    value_scales: torch.Tensor | None
    max_abs_error: float | None
    """Largest distance of a stored number from the one that the writer's bytes stand for; None: not lossy."""


class Converter:
    """Turns blocks of one pair whose verdict was accept or convert. Holds no state between calls."""

    def __init__(self, writer: Contract, reader: Contract) -> None:
        self.writer = writer
        self.reader = reader
        self.work = {
            layer: _work(writer, reader, layer) for group in writer.layer_groups for layer in group.layers
        }

    def copies_blocks(self) -> bool:
        """Whether each block of the writer is one of the reader as it is, byte by byte."""
        alike = self.writer.layout == self.reader.layout
        return alike and all(work.turn is None and work.lanes is None for work in self.work.values())

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
        """`land` for writers without shipped scales: keys and values, each [T, H, D]."""
        landed = self.land(
            layer,
            key_payload,
            value_payload,
            writer_block_start=writer_block_start,
            writer_block_count=writer_block_count,
            positions_T=positions_T,
            rotations=rotations,
        )
        return landed.keys, landed.values

    def land(
        self,
        layer: int,
        key_payload: Payload,
        value_payload: Payload,
        *,
        writer_block_start: int,
        writer_block_count: int,
        positions_T: torch.Tensor,
        rotations: RotationCache,
        key_scales: Sequence[float] | None = None,
        value_scales: Sequence[float] | None = None,
    ) -> Landed:
        """The first T tokens of blocks [start, start + count) of `layer`, in the reader's form.

        H are the heads that the writer's shard stores. `positions_T` are the integer positions of the valid
        tokens in these blocks; whatever lies behind them is dropped. The result may be a view of the
        payloads: copy it before they go.

        Raises:
            DataLoss: a payload's length isn't that of the blocks, or they can't hold T tokens; or the plan is
                lossy, and a number is NaN or infinite.
            BadRequest: scales are missing or aren't positive numbers.
        """
        tokens, layout = positions_T.numel(), self.writer.layout
        where = f"layer {layer}, blocks [{writer_block_start}, {writer_block_start + writer_block_count})"
        if tokens > writer_block_count * layout.block_size:
            raise DataLoss(f"{where} can't hold {tokens} tokens", check="totals")
        k_BSHD, v_BSHD = view_layer(key_payload, value_payload, self.writer, layer, writer_block_count, where)
        work = self.work[layer]
        k_THD = reorder_lanes(first_tokens(k_BSHD, tokens), work.lanes)
        turned = _turner(work.turn, rotations, positions_T)
        forms = key_form(layout), key_form(self.reader.layout)
        keys = _restore(k_THD, forms, key_scales, self._places(layer, tokens, "key"), turned)
        forms = value_form(layout), value_form(self.reader.layout)
        v_THD = first_tokens(v_BSHD, tokens)
        values = _restore(v_THD, forms, value_scales, self._places(layer, tokens, "value"), None)
        return _landed(keys, values)

    def _places(self, layer: int, tokens: int, side: str) -> tuple[ScalePlace, ScalePlace]:
        writer = ScalePlace(contract=self.writer, layer=layer, tokens=tokens, side=side)
        return writer, replace(writer, contract=_with_shard_of(self.reader, self.writer))


def reorder_lanes(x_THD: torch.Tensor, lanes: tuple[int, ...] | None) -> torch.Tensor:
    """The lanes in another order, bit by bit, whatever the dtype."""
    if lanes is None:
        return x_THD
    if x_THD.element_size() == 1:
        return as_octets(x_THD)[..., list(lanes)].view(x_THD.dtype)
    return x_THD[..., list(lanes)]


_Restored = tuple[torch.Tensor, torch.Tensor | None, float | None]
"""Stored numbers, their scales and the largest error."""


def _landed(keys: _Restored, values: _Restored) -> Landed:
    errors = [error for _, _, error in (keys, values) if error is not None]
    return Landed(
        keys=keys[0],
        values=values[0],
        key_scales=keys[1],
        value_scales=values[1],
        max_abs_error=max(errors, default=None),
    )


def _restore(
    x_THD: torch.Tensor,
    forms: tuple[NumberForm, NumberForm],
    shipped: Sequence[float] | None,
    places: tuple[ScalePlace, ScalePlace],
    turned: Callable[[torch.Tensor], torch.Tensor] | None,
) -> _Restored:
    """Stored numbers of the writer's form in the reader's, turned on the way."""
    writer, reader = forms
    scales = scales_of(writer, shipped, places[0])
    anew = made_anew(writer, reader, turned=turned is not None)
    if turned is None and writer.dtype is reader.dtype and not anew:
        return x_THD, scales, None
    real_THD = real_numbers(x_THD, scales)
    if turned is not None:
        real_THD = turned(real_THD)
    unbounded = turned is not None and turn_bound(writer, reader) is None
    lossy = unbounded or anew or loses(writer, reader)
    if lossy:
        require_finite(real_THD, places[0])
    new_scales = fitting_scales(real_THD, reader, places[1])
    stored_THD = stored_numbers(real_THD, reader.dtype, new_scales)
    if not lossy:
        return stored_THD, new_scales, None
    errors = (real_numbers(stored_THD, new_scales) - real_THD).abs()
    return stored_THD, new_scales, float(errors.max()) if errors.numel() else 0.0


def _turner(
    turn: Turn | None, rotations: RotationCache, positions_T: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if turn is None:
        return None
    rotation = rotations.rotation(turn.rotary, turn.context_tokens, positions_T)
    return lambda x_THD: turn.run(x_THD, rotation)


def _work(writer: Contract, reader: Contract, layer: int) -> LayerWork:
    ours, theirs = writer.group_of(layer), reader.group_of(layer)
    lanes = None
    if KeyState.NONE not in (ours.rotary.key_state, theirs.rotary.key_state):
        lanes = lane_permutation(ours.rotary, theirs.rotary.stored_lane_order, ours.key_dim)
    return LayerWork(turn=_turn(writer, reader, ours.rotary, theirs.rotary), lanes=lanes)


def _turn(writer: Contract, reader: Contract, ours: Rotary, theirs: Rotary) -> Turn | None:
    op = turn_between(ours, theirs)
    if op is None:
        return None
    if op is PlanOp.ROTATE:
        return Turn(op=op, run=rotate, rotary=theirs, context_tokens=reader.model.context_tokens)
    ours = replace(ours, stored_lane_order=theirs.stored_lane_order)
    return Turn(op=op, run=unrotate, rotary=ours, context_tokens=writer.model.context_tokens)


def _with_shard_of(contract: Contract, other: Contract) -> Contract:
    """`contract` for the heads that `other` stores, so that scales fit the heads at hand."""
    if contract.layout.shard == other.layout.shard:
        return contract
    return replace(contract, layout=replace(contract.layout, shard=other.layout.shard))
