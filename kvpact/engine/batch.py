"""One packed forward step as tensors: tokens, positions, where rows are stored, what each row attends to.

Legend: T rows of the step, B sequences attended together, t rows of each, n keys, H kv heads, Q query heads.
Angles, row numbers and masks are made once per step and layer group, and used by every layer of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvpact.contract.contract import LayerGroup
from kvpact.contract.rotation import Rotation, rotation_at
from kvpact.engine.attention import Bundle, GroupStep, attend_layer
from kvpact.engine.trace import Recorder
from kvpact.engine.witness_tap import WitnessTap
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import BlockId, KeyState


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """New rows of one sequence. `positions` are those of all its tokens, cached ones first, new ones last."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    blocks: Sequence[BlockId]
    samples: bool
    recorder: Recorder | None = None
    tap: WitnessTap | None = None
    stored: int | None = None
    """Tokens that lie in the cache already: new rows below are computed and not written. None: `cached`."""

    @property
    def cached(self) -> int:
        """Tokens before the new rows."""
        return len(self.positions) - len(self.token_ids)

    @property
    def first_written(self) -> int:
        """First token that this step writes into the cache."""
        return self.cached if self.stored is None else max(self.cached, self.stored)


class Step:
    """Everything one forward needs. Attention runs through it, layer by layer, and writes the cache."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span]) -> None:
        device = cache.device
        self._cache = cache
        self._spans = spans
        self._starts = _starts(spans)
        new_positions = [position for span in spans for position in span.positions[span.cached :]]
        tokens = [token for span in spans for token in span.token_ids]
        ends = [start + len(span.token_ids) - 1 for start, span in zip(self._starts, spans, strict=True)]
        kept = [end for end, span in zip(ends, spans, strict=True) if span.samples]
        self.token_ids_1T = torch.tensor([tokens], device=device)
        self.positions_1T = torch.tensor([new_positions], device=device)
        self.kept_rows = torch.tensor(kept, dtype=torch.int64, device=device)
        self._written_T = self._written()
        self._by_layer: dict[int, GroupStep] = {}
        for group in cache.contract.layer_groups:
            self._by_layer.update(dict.fromkeys(group.layers, self._prepare(group)))

    def attend(
        self, layer: int, q_TQD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> torch.Tensor:
        """Rotates, stores and attends in one layer; q and k are raw. Gives [T, Q, D]."""
        return attend_layer(self._cache, layer, self._by_layer[layer], q_TQD, k_THD, v_THD)

    def _prepare(self, group: LayerGroup) -> GroupStep:
        slots = [
            self._cache.slots(span.blocks, span.first_written, len(span.positions)) for span in self._spans
        ]
        return GroupStep(
            group=group,
            rotation=_angles(group, self.positions_1T[0]),
            write_rows_HT=self._cache.rows(torch.cat(slots), group.kv_heads),
            written_T=self._written_T,
            bundles=tuple(self._bundle(group, members) for members in self._members()),
        )

    def _written(self) -> torch.Tensor | None:
        """Rows of the step that are written; None: all of them."""
        if all(span.first_written == span.cached for span in self._spans):
            return None
        rows = [
            row
            for start, span in zip(self._starts, self._spans, strict=True)
            for row in range(start + span.first_written - span.cached, start + len(span.token_ids))
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self._cache.device)

    def _members(self) -> list[list[int]]:
        """Spans attended together: single rows whose lengths have the same power of two, chunks alone."""
        alike: dict[int, list[int]] = defaultdict(list)
        alone: list[list[int]] = []
        for index, span in enumerate(self._spans):
            if len(span.token_ids) == 1:
                alike[len(span.positions).bit_length()].append(index)
            else:
                alone.append([index])
        return [*alike.values(), *alone]

    def _bundle(self, group: LayerGroup, members: list[int]) -> Bundle:
        cache, device = self._cache, self._cache.device
        spans = [self._spans[index] for index in members]
        longest = max(len(span.positions) for span in spans)
        slots_Bn = torch.zeros((len(spans), longest), dtype=torch.int64, device=device)
        key_positions_Bn = torch.zeros((len(spans), longest), dtype=torch.int64, device=device)
        real_Bn = torch.zeros((len(spans), longest), dtype=torch.bool, device=device)
        for row, span in enumerate(spans):
            count = len(span.positions)
            slots_Bn[row, :count] = cache.slots(span.blocks, 0, count)
            key_positions_Bn[row, :count] = torch.tensor(span.positions, device=device)
            real_Bn[row, :count] = True
            # What is gathered but not seen is weighted 0, and 0 times a stranger's NaN isn't 0.
            slots_Bn[row, count:] = slots_Bn[row, count - 1]
        query_rows_Bt = torch.stack(
            [
                torch.arange(self._starts[index], self._starts[index] + len(self._spans[index].token_ids))
                for index in members
            ]
        ).to(device)
        query_positions_Bt = self.positions_1T[0][query_rows_Bt]
        distance_Btn = query_positions_Bt[:, :, None] - key_positions_Bn[:, None, :]
        visible_Btn = (distance_Btn >= 0) & real_Bn[:, None, :]
        if group.window is not None:
            visible_Btn &= distance_Btn < group.window
        return Bundle(
            query_rows_Bt=query_rows_Bt,
            first_rows=tuple(self._starts[index] for index in members),
            key_rows_BHn=cache.rows(slots_Bn, group.kv_heads),
            visible_Btn=visible_Btn,
            key_rotation=self._key_rotation(group, key_positions_Bn),
            recorders=tuple(span.recorder for span in spans),
            taps=tuple(span.tap for span in spans),
            query_positions_Bt=query_positions_Bt,
            key_positions=tuple(
                key_positions_Bn[row, : len(span.positions)] for row, span in enumerate(spans)
            ),
        )

    def _key_rotation(self, group: LayerGroup, key_positions_Bn: torch.Tensor) -> Rotation | None:
        """Angles [B, 1, n, R / 2] for keys that are stored raw; None if keys need none on reading."""
        if group.rotary.key_state is not KeyState.RAW:
            return None
        flat = _angles(group, key_positions_Bn.reshape(-1))
        assert flat is not None
        shape = (key_positions_Bn.shape[0], 1, key_positions_Bn.shape[1], -1)
        return replace(flat, cos=flat.cos.view(shape), sin=flat.sin.view(shape))


def _angles(group: LayerGroup, positions_T: torch.Tensor) -> Rotation | None:
    if group.rotary.key_state is KeyState.NONE:
        return None
    return rotation_at(group.rotary, group.rotary.tables[0], positions_T)


def _starts(spans: Sequence[Span]) -> list[int]:
    starts, row = [], 0
    for span in spans:
        starts.append(row)
        row += len(span.token_ids)
    return starts
