"""Checks rows that a writer shows against the reader's own table and against what landed in its cache.

Shapes: N rows of one layer group, any layers and positions; H KV heads, D lanes. Rows are float32; their
rotary lanes lie in the writer's stored order.

Two statements are proved for each row. As attended = the raw key turned by the READER's table: within what
one turn in float32 and one rounding to each dtype that the writer computes and stores in add up to, and
within the phase of the two tables where they differ by rounding, never more than counts as that. Landed =
what the plan makes of the row: bit by bit, casts included, where no step turns the key; within the bound of a
turn where one does; within one step of the quantised form where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpact.contract.contract import Contract, LayerGroup, Layout, Quantization, Rotary, RotaryTable
from kvpact.contract.convert import TORCH_DTYPES
from kvpact.contract.plan import TURN_BOUND_EPSILONS, turn_between
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.tables import PHASE_TOLERANCE_RAD, table_at, table_gap
from kvpact.errors import DataLoss
from kvpact.types import (
    Dtype,
    KeyState,
    LaneOrder,
    PlanOp,
    QuantizationGranularity,
    QuantizationScheme,
)

EPSILONS = {
    Dtype.FLOAT32: 2.0**-23,
    Dtype.FLOAT16: 2.0**-10,
    Dtype.BFLOAT16: 2.0**-7,
    Dtype.FLOAT8_E4M3: 2.0**-3,
    Dtype.FLOAT8_E5M2: 2.0**-2,
    Dtype.INT8: 1 / 127,
}
"""Step between neighbouring numbers, relative to the larger one; of int8 relative to the largest in range."""
SMALLEST = 1e-30
"""Added to bounds relative to a norm, so that a row of zeros passes."""
SMALLEST_FLOAT16 = 2.0**-24
"""Step between numbers near zero, where float16 rounds by no share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Witness rows of one group with what lies at their places in the reader's cache."""

    layers: tuple[int, ...]
    positions_N: torch.Tensor
    raw_key_NHD: torch.Tensor
    attended_key_NHD: torch.Tensor
    value_NHD: torch.Tensor
    landed_key_NHD: torch.Tensor
    landed_value_NHD: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """What the checks need of one pair and one layer group."""

    writer: LayerGroup
    reader: LayerGroup
    writer_layout: Layout
    reader_layout: Layout
    writer_table: RotaryTable | None
    reader_table: RotaryTable | None
    compute: Dtype


def check_rows(writer: Contract, reader: Contract, rows: Rows, *, table_length: int) -> float:
    """The largest absolute difference between what landed and the rows as the writer computed them.

    Args:
        rows: rows of layers that share a group in `writer` and in `reader`.
        table_length: length for which the handoff's tables were picked.

    Raises:
        DataLoss: check "witness"; the message names layer, position, K or V, and what doesn't hold.
    """
    sides = _sides(writer, reader, rows.layers[0], table_length)
    phase_N = _accepted_phase(sides, rows, table_length)
    turned_NHD = _turned(sides, rows)
    _check_attended(sides, rows, turned_NHD, phase_N)
    key_error = _check_landed_keys(sides, rows, turned_NHD)
    return max(key_error, _check_landed_values(sides, rows))


def _sides(writer: Contract, reader: Contract, layer: int, table_length: int) -> _Sides:
    ours, theirs = writer.group_of(layer), reader.group_of(layer)
    return _Sides(
        writer=ours,
        reader=theirs,
        writer_layout=writer.layout,
        reader_layout=reader.layout,
        writer_table=table_at(ours.rotary, length=table_length, context_tokens=writer.model.context_tokens),
        reader_table=table_at(theirs.rotary, length=table_length, context_tokens=reader.model.context_tokens),
        compute=writer.model.compute_dtype,
    )


def _turned(sides: _Sides, rows: Rows) -> torch.Tensor:
    """Raw keys turned by the reader's table, in the writer's lanes."""
    rotary, table = sides.reader.rotary, sides.reader_table
    if rotary.key_state is KeyState.NONE:
        return rows.raw_key_NHD
    assert table is not None, "a pair without numbers for this length is refused when it is compared"
    lanes = replace(rotary, stored_lane_order=sides.writer.rotary.stored_lane_order)
    return rotate(rows.raw_key_NHD, rotation_at(lanes, table, rows.positions_N))


def _accepted_phase(sides: _Sides, rows: Rows, table_length: int) -> torch.Tensor:
    """Phase [N] by which the two tables differ at the rows, where that counts as rounding."""
    none_N = torch.zeros(len(rows.layers))
    ours, theirs = sides.writer_table, sides.reader_table
    if sides.reader.rotary.key_state is KeyState.NONE or ours is None or theirs is None:
        return none_N
    if ours.inv_freq == theirs.inv_freq:
        return none_N
    gap = table_gap(ours, theirs, reach=table_length)
    if not gap.largest_phase_rad <= PHASE_TOLERANCE_RAD:
        raise DataLoss(
            f"witness of layer {rows.layers[0]}: for {table_length} tokens the writer names a table that is "
            f"off this reader's by {gap.largest_phase_rad:.3g} rad, allowed {PHASE_TOLERANCE_RAD:g}",
            check="witness",
        )
    return (rows.positions_N.float() * gap.rad_per_position).clamp(max=PHASE_TOLERANCE_RAD)


def _check_attended(sides: _Sides, rows: Rows, turned_NHD: torch.Tensor, phase_N: torch.Tensor) -> None:
    dtypes = {sides.compute, sides.writer_layout.key_dtype}
    norm_NHD = _pair_norms(sides.writer.rotary, turned_NHD)
    allowed_NHD = (_attended_bound(dtypes) + phase_N[:, None, None]) * norm_NHD
    allowed_NHD = allowed_NHD + _step(sides.writer_layout, rows.raw_key_NHD, key=True)
    if Dtype.FLOAT16 in dtypes:
        allowed_NHD = allowed_NHD + SMALLEST_FLOAT16
    _compare(
        rows,
        "K as attended isn't the raw key turned by this reader's table",
        rows.attended_key_NHD,
        turned_NHD,
        allowed_NHD,
    )


def _check_landed_keys(sides: _Sides, rows: Rows, turned_NHD: torch.Tensor) -> float:
    ours, theirs = sides.writer.rotary, sides.reader.rotary
    turn = turn_between(ours, theirs)
    if turn is None:
        shown_NHD = rows.raw_key_NHD if ours.key_state is KeyState.RAW else rows.attended_key_NHD
    else:
        shown_NHD = turned_NHD if turn is PlanOp.ROTATE else rows.raw_key_NHD
    expected_NHD = _reordered(ours, theirs, shown_NHD)
    allowed_NHD = torch.zeros(())
    if turn is not None:
        epsilon, bound = _turn_bound(
            sides.compute, sides.writer_layout.key_dtype, sides.reader_layout.key_dtype
        )
        norm_NHD = _pair_norms(theirs, _reordered(ours, theirs, turned_NHD))
        allowed_NHD = bound * epsilon * torch.maximum(norm_NHD, _pair_norms(theirs, expected_NHD))
    return _check_landed(sides, rows, expected_NHD, allowed_NHD, key=True)


def _check_landed_values(sides: _Sides, rows: Rows) -> float:
    return _check_landed(sides, rows, rows.value_NHD, torch.zeros(()), key=False)


def _check_landed(
    sides: _Sides, rows: Rows, shown_NHD: torch.Tensor, allowed_NHD: torch.Tensor, *, key: bool
) -> float:
    """Compares with the row as both sides would have stored it; gives the error against the row itself."""
    landed_NHD = rows.landed_key_NHD if key else rows.landed_value_NHD
    stored_NHD = shown_NHD
    for layout in (sides.writer_layout, sides.reader_layout):
        stored_NHD = _stored(layout, stored_NHD, key=key)
        allowed_NHD = allowed_NHD + _step(layout, shown_NHD, key=key)
    what = f"{'K' if key else 'V'} as landed isn't what the plan makes of the row"
    _compare(rows, what, landed_NHD, stored_NHD, allowed_NHD)
    return float((landed_NHD - shown_NHD).abs().max())


def _compare(
    rows: Rows, what: str, found_NHD: torch.Tensor, expected_NHD: torch.Tensor, allowed_NHD: torch.Tensor
) -> None:
    gap_NHD = (found_NHD - expected_NHD).abs().nan_to_num(nan=torch.inf)
    over_NHD = gap_NHD - allowed_NHD
    if bool((over_NHD <= SMALLEST).all()):
        return
    row = int(over_NHD.flatten(1).max(dim=1).values.argmax())
    raise DataLoss(
        f"witness of layer {rows.layers[row]}, position {int(rows.positions_N[row])}: {what}; off by "
        f"{float(gap_NHD[row].max()):.3g}, allowed {float(allowed_NHD.expand_as(gap_NHD)[row].max()):.3g}",
        check="witness",
    )


def _attended_bound(dtypes: set[Dtype]) -> float:
    """A turn in float32 with one rounding to each of `dtypes`, relative to the norm of a pair of lanes.

    A rounding is half an epsilon of a dtype with bounds on its turns, a whole one of others.
    """
    factor = 1 + TURN_BOUND_EPSILONS[Dtype.FLOAT32] * EPSILONS[Dtype.FLOAT32]
    for dtype in dtypes - {Dtype.FLOAT32}:
        factor *= 1 + EPSILONS[dtype] * (0.5 if dtype in TURN_BOUND_EPSILONS else 1.0)
    return factor - 1


def _turn_bound(*dtypes: Dtype) -> tuple[float, float]:
    """Epsilon of the coarsest of `dtypes` and float32, and how many of them one turn may miss by."""
    coarsest = max((Dtype.FLOAT32, *dtypes), key=EPSILONS.__getitem__)
    return EPSILONS[coarsest], TURN_BOUND_EPSILONS.get(coarsest, 1.0)


def _stored(layout: Layout, x_NHD: torch.Tensor, *, key: bool) -> torch.Tensor:
    """Rows as the layout's dtype holds them; quantised ones are left, since their scale isn't in the row."""
    dtype, quantization = _form(layout, key=key)
    if quantization.scheme is not QuantizationScheme.NONE:
        return x_NHD
    return x_NHD.to(TORCH_DTYPES[dtype]).to(torch.float32)


def _step(layout: Layout, x_NHD: torch.Tensor, *, key: bool) -> torch.Tensor:
    """How far a quantised form may be off a row: one step at the largest number that shares its scale.

    Where a scale serves more than a token, that number may lie outside the rows that are shown: then four
    steps at their largest.
    """
    dtype, quantization = _form(layout, key=key)
    if quantization.scheme is QuantizationScheme.NONE:
        return torch.zeros(())
    if quantization.fixed_scales and dtype is Dtype.INT8:
        return torch.tensor(max(quantization.fixed_scales))
    if quantization.granularity is QuantizationGranularity.TOKEN:
        return EPSILONS[dtype] * x_NHD.abs().amax(dim=(1, 2), keepdim=True)
    return 4 * EPSILONS[dtype] * x_NHD.abs().max()


def _form(layout: Layout, *, key: bool) -> tuple[Dtype, Quantization]:
    if key:
        return layout.key_dtype, layout.key_quantization
    return layout.value_dtype, layout.value_quantization


def _pair_norms(rotary: Rotary, x_NHD: torch.Tensor) -> torch.Tensor:
    """For each rotary lane the norm of the pair it belongs to; for others its own size."""
    norms_NHD = x_NHD.abs()
    if rotary.rotary_dim == 0:
        return norms_NHD
    start, end = rotary.lane_offset, rotary.lane_offset + rotary.rotary_dim
    lanes = x_NHD[..., start:end]
    if rotary.stored_lane_order is LaneOrder.HALF_SPLIT:
        pair = lanes.unflatten(-1, (2, -1)).norm(dim=-2)
        norms_NHD[..., start:end] = torch.cat((pair, pair), dim=-1)
    else:
        norms_NHD[..., start:end] = lanes.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
    return norms_NHD


def _reordered(ours: Rotary, theirs: Rotary, x_NHD: torch.Tensor) -> torch.Tensor:
    """Rotary lanes from the writer's stored order to the reader's."""
    if ours.stored_lane_order is theirs.stored_lane_order or ours.rotary_dim == 0:
        return x_NHD
    start, end = ours.lane_offset, ours.lane_offset + ours.rotary_dim
    pairs = (-1, 2) if ours.stored_lane_order is LaneOrder.ADJACENT else (2, -1)
    lanes = x_NHD[..., start:end].unflatten(-1, pairs).transpose(-1, -2).flatten(-2)
    return torch.cat((x_NHD[..., :start], lanes, x_NHD[..., end:]), dim=-1)
