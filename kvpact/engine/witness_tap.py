"""Copies the witness rows of one sequence out of attention, whichever of its forwards computes them.

Legend: T rows of the step, t rows of the sequence in it, n keys, H kv heads, D lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvpact.contract.witness_places import Place
from kvpact.engine.requests import WitnessRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedRows:
    """Rows of one sequence in one layer of one step: tokens [first, first + t) of it, raw and as attended."""

    first: int
    k_tHD: torch.Tensor
    """Raw keys, before rotation."""
    v_tHD: torch.Tensor
    k_HnD: torch.Tensor
    """Keys of all its tokens as they are multiplied."""


class WitnessTap:
    """Keeps one row for each place. A row that is computed again replaces the one before."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)
        for place in places:
            self._tokens[place.layer].append(place.token)
        self._rows: dict[Place, WitnessRow] = {}

    def take(self, layer: int, rows: AttendedRows) -> None:
        """Copies the rows of `layer` that this step computes. Called on the computing thread."""
        end = rows.first + rows.k_tHD.shape[0]
        tokens = [token for token in self._tokens.get(layer, ()) if rows.first <= token < end]
        if not tokens:
            return
        index = torch.tensor(tokens, device=rows.k_tHD.device)
        raw_NHD = _copied(rows.k_tHD.index_select(0, index - rows.first))
        value_NHD = _copied(rows.v_tHD.index_select(0, index - rows.first))
        attended_NHD = _copied(rows.k_HnD.index_select(1, index).transpose(0, 1))
        parts = zip(tokens, raw_NHD.unbind(), attended_NHD.unbind(), value_NHD.unbind(), strict=True)
        for token, raw_HD, attended_HD, value_HD in parts:
            place = Place(layer=layer, token=token)
            self._rows[place] = WitnessRow(
                place=place, raw_key_HD=raw_HD, attended_key_HD=attended_HD, value_HD=value_HD
            )

    def rows(self, places: Iterable[Place]) -> tuple[WitnessRow, ...]:
        """The rows of `places`, all captured by now, in their order."""
        return tuple(self._rows[place] for place in places)

    def copied(self, place: Place) -> WitnessRow:
        """A row, captured by now, that stays when this tap and its other rows go."""
        return _cloned(self._rows[place])


def _cloned(row: WitnessRow) -> WitnessRow:
    return WitnessRow(
        place=row.place,
        raw_key_HD=row.raw_key_HD.clone(),
        attended_key_HD=row.attended_key_HD.clone(),
        value_HD=row.value_HD.clone(),
    )


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype=torch.float32, device="cpu", copy=True)
