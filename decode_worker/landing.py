"""Puts a writer's bytes into the reader's cache: a handoff's landing over a conversion and a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.convert_fast import Destination, FastConverter, serves
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import BlockId, PositionRun, Verdict


class CacheLanding:
    """One handle per handoff. The cache is the engine's; blocks are the receiver's until they are taken."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def prepare(
        self, writer: Contract, verdict: Verdict, terms: HandoffTerms, blocks: Sequence[BlockId]
    ) -> CacheLandingHandle:
        """A handle for one push; `verdict` is not a reject."""
        return CacheLandingHandle(self._cache, Converter(writer, self._cache.contract), terms, blocks)


class CacheLandingHandle:
    """One handoff's way into the cache: in one pass where that is served, else by the reference."""

    def __init__(
        self, cache: PagedCache, converter: Converter, terms: HandoffTerms, blocks: Sequence[BlockId]
    ) -> None:
        self._cache = cache
        self._converter = converter
        storage, _ = cache.storage(0)
        self._fast = FastConverter(converter) if serves(converter, storage) else None
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._block_numbers = np.asarray(blocks, dtype=np.uint64)
        self._positions_T = expand_positions(terms.positions)
        self._rotations = RotationCache(table_length=terms.table_length)
        self._block_size = converter.writer.layout.block_size
        layers = cache.contract.layer_count()
        self._arrived = torch.zeros((layers, len(self._positions_T)), dtype=torch.bool)
        self.max_abs_error: float | None = None
        """Largest error that a lossy plan has made so far, over every number landed; None: not lossy."""

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """Converts the chunk's tokens and stores them in the reader's form."""
        start = header.block_start * self._block_size
        end = min(start + header.block_count * self._block_size, len(self._positions_T))
        self._arrived[header.layer, start:end] = True
        if self._fast is None or header.key_scales or header.value_scales:
            self._land_by_reference(header, keys, values, start, end)
            return
        stored_keys, stored_values = self._cache.storage(header.layer)
        destination = Destination(
            keys=stored_keys, values=stored_values, blocks=self._block_numbers, first_token=start
        )
        self._fast.convert_into(
            header.layer,
            keys,
            values,
            writer_block_start=header.block_start,
            writer_block_count=header.block_count,
            positions_T=self._positions_T[start:end],
            rotations=self._rotations,
            destination=destination,
        )

    def finish(self, prompt_tokens: int) -> None:
        """Zeroes what lies behind the prompt in its last block, and what windows let stay with the writer.

        Attention weights both 0, and 0 times a NaN that blocks still hold from another request isn't 0.
        """
        self._cache.zero_tail(self._blocks, prompt_tokens)
        slots_T = self._cache.slots(self._blocks.tolist(), 0, len(self._positions_T))
        for layer, arrived_T in enumerate(self._arrived.to(slots_T.device)):
            if not arrived_T.all():
                self._zero(layer, slots_T[~arrived_T])

    def _zero(self, layer: int, slots_T: torch.Tensor) -> None:
        rows = self._cache.rows(slots_T, self._cache.contract.group_of(layer).kv_heads).reshape(-1)
        for storage in self._cache.storage(layer):
            storage.view(-1, storage.shape[-1]).index_fill_(0, rows, 0)

    def _land_by_reference(
        self, header: ChunkHeader, keys: Buffer, values: Buffer, start: int, end: int
    ) -> None:
        landed = self._converter.land(
            header.layer,
            keys,
            values,
            writer_block_start=header.block_start,
            writer_block_count=header.block_count,
            positions_T=self._positions_T[start:end],
            rotations=self._rotations,
            key_scales=header.key_scales or None,
            value_scales=header.value_scales or None,
        )
        self._cache.write(header.layer, self._blocks, start, landed.keys, landed.values)
        if landed.max_abs_error is not None:
            # numpy's maximum keeps a NaN, Python's drops it or not by the order of its arguments.
            self.max_abs_error = float(np.maximum(self.max_abs_error or 0.0, landed.max_abs_error))


def expand_positions(runs: Sequence[PositionRun]) -> torch.Tensor:
    """Position of each token, int64 [T]."""
    return torch.cat([torch.arange(run.start, run.start + run.count) for run in runs])
