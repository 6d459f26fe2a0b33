"""Puts a writer's bytes into the reader's cache: the handoff's landing over a converter and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
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
    """One handoff's way into the cache."""

    def __init__(
        self, cache: PagedCache, converter: Converter, terms: HandoffTerms, blocks: Sequence[BlockId]
    ) -> None:
        self._cache = cache
        self._converter = converter
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._positions_T = expand_positions(terms.positions)
        self._rotations = RotationCache(table_length=terms.table_length)
        self._block_size = converter.writer.layout.block_size

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """Converts the chunk's tokens and stores them in the reader's form."""
        start = header.block_start * self._block_size
        end = min(start + header.block_count * self._block_size, len(self._positions_T))
        k_THD, v_THD = self._converter.convert(
            header.layer,
            keys,
            values,
            writer_block_start=header.block_start,
            writer_block_count=header.block_count,
            positions_T=self._positions_T[start:end],
            rotations=self._rotations,
        )
        self._cache.write(header.layer, self._blocks, start, k_THD, v_THD)

    def finish(self, prompt_tokens: int) -> None:
        """Zeroes what lies behind the prompt in its last block."""
        self._cache.zero_tail(self._blocks, prompt_tokens)


def expand_positions(runs: Sequence[PositionRun]) -> torch.Tensor:
    """Position of each token, int64 [T]."""
    return torch.cat([torch.arange(run.start, run.start + run.count) for run in runs])
