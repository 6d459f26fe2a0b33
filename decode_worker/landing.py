"""Puts a writer's bytes into the reader's cache: a handoff's landing over a conversion and a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.convert_fast import Destination, FastConverter, serves
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms
from kvpact.kvcache.paged_cache import PagedCache, adjacent
from kvpact.types import BlockId, PositionRun, Verdict


class CacheLanding:
    """One handle per handoff. The cache is the engine's; blocks are the receiver's until they are taken."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> CacheLandingHandle:
        """A handle for one push; `verdict` is not a reject."""
        converter = Converter(writer, self._cache.contract)
        return CacheLandingHandle(self._cache, converter, terms, blocks, held_tokens)


class CacheLandingHandle:
    """One handoff's way into the cache: in one pass where that is served, else by the reference."""

    def __init__(
        self,
        cache: PagedCache,
        converter: Converter,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        held_tokens: int,
    ) -> None:
        assert held_tokens % cache.block_size == 0, "no block is shared and written"
        assert held_tokens % converter.writer.layout.block_size == 0, "no chunk begins in the held prefix"
        self._cache = cache
        self._converter = converter
        self.brief = cache.device.type == "cpu" and converter.copies_blocks()
        """Whether blocks land as they are."""
        storage, _ = cache.storage(0)
        self._fast = FastConverter(converter) if serves(converter, storage) else None
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._block_numbers = np.asarray(blocks, dtype=np.uint64)
        self._positions_T = expand_positions(terms.positions)
        self._rotations = RotationCache(table_length=terms.table_length)
        self._block_size = converter.writer.layout.block_size
        layers = cache.contract.layer_count()
        self._held_tokens = held_tokens
        self._arrived = np.zeros((layers, len(self._positions_T)), dtype=np.bool_)
        self._arrived[:, :held_tokens] = True
        self.max_abs_error: float | None = None
        """Largest error that a lossy plan has made so far, over every number landed; None: not lossy."""

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """Converts the chunk's tokens and stores them in the reader's form."""
        start = header.block_start * self._block_size
        end = min(start + header.block_count * self._block_size, len(self._positions_T))
        assert start >= self._held_tokens, "the session refuses chunks of the held prefix"
        self._arrived[header.layer, start:end] = True
        if header.key_scales or header.value_scales:
            self._land_by_reference(header, keys, values, start, end)
        elif self.brief:
            self._copy_blocks(header, keys, values)
        elif self._fast is None:
            self._land_by_reference(header, keys, values, start, end)
        else:
            self._land_in_one_pass(self._fast, header, keys, values, start, end)

    def finish(self, prompt_tokens: int) -> None:
        """Zeroes what lies behind the prompt in its last block, and what windows let stay with the writer.

        Attention weights both 0, and 0 times a NaN that blocks still hold from another request isn't 0.
        """
        assert prompt_tokens > self._held_tokens, "the last token's block is never held"
        self._cache.zero_tail(self._blocks, prompt_tokens)
        slots_T = self._cache.slots(self._blocks.tolist(), 0, len(self._positions_T))
        for layer, arrived_T in enumerate(torch.from_numpy(self._arrived).to(slots_T.device)):
            if not arrived_T.all():
                self._zero(layer, slots_T[~arrived_T])

    def _zero(self, layer: int, slots_T: torch.Tensor) -> None:
        rows = self._cache.rows(slots_T, self._cache.contract.group_of(layer).kv_heads).reshape(-1)
        for storage in self._cache.storage(layer):
            storage.view(-1, storage.shape[-1]).index_fill_(0, rows, 0)

    def _copy_blocks(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """Whole blocks; what lies behind the prompt in the last is zeroed by `finish`."""
        start = header.block_start
        blocks = self._block_numbers[start : start + header.block_count]
        place = slice(int(blocks[0]), int(blocks[-1]) + 1) if adjacent(blocks) else blocks
        for payload, stored in zip((keys, values), self._cache.octets(header.layer), strict=True):
            stored[place] = np.frombuffer(payload, dtype=np.uint8).reshape(len(blocks), -1)

    def _land_in_one_pass(
        self, fast: FastConverter, header: ChunkHeader, keys: Buffer, values: Buffer, start: int, end: int
    ) -> None:
        stored_keys, stored_values = self._cache.storage(header.layer)
        destination = Destination(
            keys=stored_keys, values=stored_values, blocks=self._block_numbers, first_token=start
        )
        fast.convert_into(
            header.layer,
            keys,
            values,
            writer_block_start=header.block_start,
            writer_block_count=header.block_count,
            positions_T=self._positions_T[start:end],
            rotations=self._rotations,
            destination=destination,
        )

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
