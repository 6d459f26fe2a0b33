"""Gathers one layer of a reader's shard from the shards of several writers.

Shapes: T tokens, H heads of the reader's shard, D lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, Landed, RotationCache
from kvpact.contract.convert_blocks import Payload
from kvpact.contract.numbers import NumberForm, key_form, value_form
from kvpact.contract.shards import head_sources, held_heads, obstacle_to_splits
from kvpact.errors import BadRequest
from kvpact.types import QuantizationGranularity


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """One writer's blocks of one layer, from its first block on; None of a layer that it doesn't hold."""

    keys: Payload
    values: Payload
    key_scales: tuple[float, ...] | None = None
    value_scales: tuple[float, ...] | None = None


class ShardGatherer:
    """Several writers of one cache and one reader, whose joint verdict was accept or convert."""

    def __init__(self, writers: Sequence[Contract], reader: Contract) -> None:
        """Raises BadRequest, param shard, where heads can't be split as a side says."""
        obstacle = obstacle_to_splits((*writers, reader))
        if obstacle:
            raise BadRequest(f"shard: {obstacle}", param="shard")
        self._writers = tuple(writers)
        self._reader = reader
        self._converters = [Converter(writer, reader) for writer in writers]

    def gather(
        self,
        layer: int,
        payloads: Sequence[ShardPayload | None],
        *,
        positions_T: torch.Tensor,
        rotations: RotationCache,
    ) -> Landed:
        """Keys and values [T, H, D] of `layer`, each head from the writer of lowest rank that holds it.

        Args:
            payloads: one for each writer, in the writers' order.

        Raises:
            BadRequest: a head of the reader comes from no writer, scales are missing, or the reader has one
                for the layer and the writers' differ.
            DataLoss: a payload's length isn't that of its blocks.
        """
        sources = head_sources(self._writers, self._reader, layer)
        for head, source in zip(held_heads(self._reader.group_of(layer), self._reader), sources, strict=True):
            if source is None or payloads[source.writer] is None:
                raise BadRequest(f"shard: nobody sent head {head} of layer {layer}", param="shard")
        used = sorted({source.writer for source in sources if source is not None})
        landed = {
            writer: self._land(writer, layer, payloads[writer], positions_T, rotations) for writer in used
        }
        chosen = [(landed[source.writer], source.head) for source in sources if source is not None]
        layout = self._reader.layout
        errors = [part.max_abs_error for part in landed.values() if part.max_abs_error is not None]
        return Landed(
            keys=torch.stack([part.keys[:, head] for part, head in chosen], dim=1),
            values=torch.stack([part.values[:, head] for part, head in chosen], dim=1),
            key_scales=_stacked([(part.key_scales, head) for part, head in chosen], key_form(layout)),
            value_scales=_stacked([(part.value_scales, head) for part, head in chosen], value_form(layout)),
            max_abs_error=max(errors, default=None),
        )

    def _land(
        self,
        writer: int,
        layer: int,
        payload: ShardPayload | None,
        positions_T: torch.Tensor,
        rotations: RotationCache,
    ) -> Landed:
        assert payload is not None
        size = self._writers[writer].layout.block_size
        return self._converters[writer].land(
            layer,
            payload.keys,
            payload.values,
            writer_block_start=0,
            writer_block_count=-(-positions_T.numel() // size),
            positions_T=positions_T,
            rotations=rotations,
            key_scales=payload.key_scales,
            value_scales=payload.value_scales,
        )


def _stacked(parts: Sequence[tuple[torch.Tensor | None, int]], form: NumberForm) -> torch.Tensor | None:
    """Scales of the reader's heads, one beside the other, or the one that all heads share.

    The granularity tells which, never how many there are: a writer of one head has one scale as well.
    """
    scales = [(part, head) for part, head in parts if part is not None]
    if not scales:
        return None
    if form.quantization.granularity is not QuantizationGranularity.TENSOR:
        return torch.cat([part[:, head : head + 1] for part, head in scales], dim=1)
    found = sorted({float(part) for part, _ in scales})
    if len(found) > 1:
        problem = f"writers have {', '.join(map(repr, found))}, the reader has one for the whole layer"
        raise BadRequest(f"scales: {problem}", param="shard")
    return scales[0][0]
