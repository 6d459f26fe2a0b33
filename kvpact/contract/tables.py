"""Rotary tables as numbers: which one runs at a length, and how far apart two of them turn a key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpact.contract.contract import Rotary, RotaryTable
from kvpact.contract.rope import formula_table
from kvpact.types import FrequencyPolicy

PHASE_TOLERANCE_RAD = 0.02
"""Largest phase difference, over all positions within reach, that counts as rounding."""


def table_at(rotary: Rotary, *, length: int, context_tokens: int) -> RotaryTable | None:
    """The table that turns keys of a request of `length` tokens on a side serving `context_tokens`.

    None where the side has no numbers for that length: no tables at all, or beyond them a formula that isn't
    known or gives other lanes than those that turn.
    """
    if rotary.frequency_policy is FrequencyPolicy.BY_SERVED_LENGTH:
        length = context_tokens
    for table in rotary.tables:
        if table.upper_length is None or length <= table.upper_length:
            return table
    if rotary.formula is None:
        return rotary.tables[-1] if rotary.tables else None
    try:
        table = formula_table(rotary.formula, length)
    except ValueError:
        return None
    return table if len(table.inv_freq) * 2 == rotary.rotary_dim else None


def moves_within(rotary: Rotary, reach: int) -> bool:
    """Whether the side would change tables while a request grows to `reach` tokens."""
    if rotary.frequency_policy is not FrequencyPolicy.BY_CURRENT_LENGTH or not rotary.tables:
        return False
    first_switch = rotary.tables[0].upper_length
    return first_switch is not None and reach > first_switch


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGap:
    """How far keys turned by one table are from keys turned by another, over positions [0, reach)."""

    lane: int
    """Pair of lanes with the largest difference of frequencies."""
    rad_per_position: float
    """That difference."""
    last_position: int
    """reach - 1, at least 0."""
    logit_factor: float
    """Bound on how far one attention logit moves, in units of |q| |k| softmax_scale."""

    def phase_rad(self, position: int) -> float:
        """Largest phase error of a key at `position`."""
        return self.rad_per_position * position

    @property
    def largest_phase_rad(self) -> float:
        """Phase error at the last position."""
        return self.phase_rad(self.last_position)

    @property
    def first_position_past_one_rad(self) -> int | None:
        """First position, within reach or not, at which the error is above 1 rad; None: never."""
        if not 0 < self.rad_per_position < math.inf or math.isinf(1 / self.rad_per_position):
            return None
        return math.floor(1 / self.rad_per_position) + 1


def table_gap(writer: RotaryTable, reader: RotaryTable, *, reach: int) -> TableGap:
    """The gap over positions [0, reach). A lane that one table lacks counts as one that doesn't turn."""
    last_position = max(reach - 1, 0)
    writer_lanes = [(frequency, writer.amplitude) for frequency in writer.inv_freq]
    reader_lanes = [(frequency, reader.amplitude) for frequency in reader.inv_freq]
    still = [(0.0, 1.0)]
    lanes = max(len(writer_lanes), len(reader_lanes), 1)
    writer_lanes += still * (lanes - len(writer_lanes))
    reader_lanes += still * (lanes - len(reader_lanes))
    gaps = [abs(w - r) for (w, _), (r, _) in zip(writer_lanes, reader_lanes, strict=True)]
    widest = next((i for i, gap in enumerate(gaps) if math.isnan(gap)), None)
    lane = max(range(lanes), key=gaps.__getitem__) if widest is None else widest
    factor = max(
        chord(gap * last_position, writer_amplitude, reader_amplitude)
        for gap, (_, writer_amplitude), (_, reader_amplitude) in zip(
            gaps, writer_lanes, reader_lanes, strict=True
        )
    )
    return TableGap(lane=lane, rad_per_position=gaps[lane], last_position=last_position, logit_factor=factor)


def chord(largest_phase_rad: float, writer_amplitude: float = 1.0, reader_amplitude: float = 1.0) -> float:
    """max |a_w - a_r e^(i phi)| over phases phi in [0, largest]; 2 |sin(phi / 2)| for amplitudes of 1.

    It grows up to a phase of pi and stays at a_w + a_r from there on.
    """
    if not largest_phase_rad < math.pi:
        return writer_amplitude + reader_amplitude
    half = math.sin(largest_phase_rad / 2)
    apart = writer_amplitude - reader_amplitude
    return math.sqrt(apart * apart + 4 * abs(writer_amplitude * reader_amplitude) * half * half)
