"""Checks a handoff's witnesses against what lies in the reader's cache, before anybody sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.shards import held_heads
from kvpact.contract.witness import Rows, check_rows
from kvpact.contract.witness_places import Place
from kvpact.errors import DataLoss
from kvpact.handoff.messages import Witness, WitnessReport
from kvpact.handoff.terms import positions_of
from kvpact.handoff.trust import Landed
from kvpact.handoff.witness_terms import places_to_show
from kvpact.kvcache.paged_cache import PagedCache

FLOAT32_BYTES = 4


class CacheVerifier:
    """Reads landed rows from the cache; the blocks are the receiver's."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def verify(self, landed: Landed, witnesses: Sequence[Witness]) -> WitnessReport:
        """See Verifier."""
        terms = landed.terms
        places = places_to_show(
            landed.writer,
            terms,
            nonce=landed.nonce,
            first_computed=landed.first_computed,
            held=landed.held,
        )
        positions = positions_of(terms.positions)
        shown = _by_place(places, positions, witnesses)
        for members in self._alike(landed.writer, places):
            rows = self._rows(landed, members, positions, shown)
            check_rows(landed.writer, self._cache.contract, rows, table_length=terms.table_length)
        return WitnessReport(
            row_count=len(places), shows_rotation=any(positions[place.token] > 0 for place in places)
        )

    def _alike(self, writer: Contract, places: Sequence[Place]) -> list[list[Place]]:
        """Places of layers that share a group on both sides, so that one pass checks them."""
        ours, theirs = _groups(writer), _groups(self._cache.contract)
        alike: dict[tuple[int, int], list[Place]] = defaultdict(list)
        for place in places:
            alike[ours[place.layer], theirs[place.layer]].append(place)
        return list(alike.values())

    def _rows(
        self,
        landed: Landed,
        places: Sequence[Place],
        positions: Sequence[int],
        shown: dict[Place, Witness],
    ) -> Rows:
        writer = landed.writer
        group = writer.group_of(places[0].layer)
        heads = len(held_heads(group, writer))
        rows = [shown[place] for place in places]
        keys, values = self._landed_rows(landed, places)
        return Rows(
            layers=tuple(place.layer for place in places),
            positions_N=torch.tensor([positions[place.token] for place in places]),
            raw_key_NHD=_stack(rows, "raw_key", heads, group.key_dim),
            attended_key_NHD=_stack(rows, "attended_key", heads, group.key_dim),
            value_NHD=_stack(rows, "value", heads, group.value_dim),
            landed_key_NHD=keys,
            landed_value_NHD=values,
        )

    def _landed_rows(self, landed: Landed, places: Sequence[Place]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at places, float32 [N, H, D] in host memory."""
        cache = self._cache
        slots_T = cache.slots(landed.blocks, 0, len(landed.terms.token_ids))
        keys, values = [], []
        for layer, members in groupby(places, lambda place: place.layer):
            tokens = torch.tensor([place.token for place in members])
            rows_Hn = cache.rows(slots_T[tokens], cache.contract.group_of(layer).kv_heads)
            keys.append(cache.keys_at(layer, rows_Hn).transpose(0, 1).float().cpu())
            values.append(cache.values_at(layer, rows_Hn).transpose(0, 1).float().cpu())
        return torch.cat(keys), torch.cat(values)


def _groups(contract: Contract) -> dict[int, int]:
    return {layer: index for index, group in enumerate(contract.layer_groups) for layer in group.layers}


def _by_place(
    places: Sequence[Place], positions: Sequence[int], witnesses: Sequence[Witness]
) -> dict[Place, Witness]:
    """The witness of each place. Raises DataLoss unless there is exactly one for each, and no other."""
    shown = {(witness.layer, witness.position): witness for witness in witnesses}
    wanted = {(place.layer, positions[place.token]): place for place in places}
    missing = sorted(wanted.keys() - shown.keys())
    if missing or len(witnesses) != len(wanted):
        first = f"; layer {missing[0][0]}, position {missing[0][1]} is missing" if missing else ""
        raise DataLoss(
            f"the writer shows {len(witnesses)} witness rows where {len(wanted)} were asked for{first}",
            check="witness",
        )
    return {place: shown[where] for where, place in wanted.items()}


def _stack(witnesses: Sequence[Witness], field: str, heads: int, width: int) -> torch.Tensor:
    expected = heads * width * FLOAT32_BYTES
    rows = []
    for witness in witnesses:
        data = getattr(witness, field)
        if len(data) != expected:
            raise DataLoss(
                f"witness of layer {witness.layer}, position {witness.position}: {field} has {len(data)} "
                f"bytes; {heads} heads of {width} lanes take {expected}",
                check="witness",
            )
        rows.append(torch.frombuffer(bytearray(data), dtype=torch.float32).view(heads, width))
    return torch.stack(rows)
