"""Parts of one push as the writer makes them: open, chunks of blocks that are ready, commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from kvpact.clock import Clock
from kvpact.contract.contract import Contract
from kvpact.handoff.chunks import (
    LayerBlocks,
    block_count,
    blocks_per_chunk,
    chunk_checksum,
    layer_blocks,
    split_blocks,
)
from kvpact.handoff.messages import (
    Buffer,
    Chunk,
    ChunkHeader,
    Commit,
    HandoffTerms,
    Open,
    PushPart,
    Reservation,
    Witness,
)


class BlockReader(Protocol):
    """Reads the writer's cache. Called on executor threads, one call at a time for each handoff."""

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """Keys and values of `blocks`, counted from 0 in the prompt's sequence, as stored and without gaps.

        The buffers stay valid and unchanged until the handoff ends.
        """


ShowWitnesses = Callable[[], tuple[Witness, ...]]


def show_none() -> tuple[Witness, ...]:
    """No rows; a reader that checks refuses such a handoff."""
    return ()


class Outgoing:
    """Makes the parts of one push, once. Facts of it can be read while and after it runs."""

    def __init__(
        self,
        *,
        terms: HandoffTerms,
        reservation: Reservation,
        contract: Contract,
        clock: Clock,
        executor: Executor | None,
    ) -> None:
        self._terms = terms
        self._reservation = reservation
        self._block_size = contract.layout.block_size
        self._layers = layer_blocks(contract, terms.required, terms.positions)
        self._clock = clock
        self._executor = executor
        self._reading: asyncio.Future[Chunk] | None = None
        self.chunk_count = 0
        self.payload_bytes = 0
        self.first_token_id: int | None = None
        self.started_s: float | None = None
        """Clock time of the first chunk."""
        self.computed_s: float | None = None
        """Clock time at which the whole prompt was computed."""

    async def parts(
        self,
        computed: AsyncIterator[int],
        read: BlockReader,
        first_token: asyncio.Future[int],
        witnesses: ShowWitnesses = show_none,
    ) -> AsyncGenerator[PushPart, None]:
        """Open, chunks of complete blocks as `computed` grows, the last partial block at the end, commit.

        Args:
            computed: prompt tokens computed so far, ascending, the last one the whole prompt.
            first_token: awaited before the commit; the caller's, never cancelled from here.
            witnesses: gives the rows that the reservation's nonce picked, once the first token is there.
        """
        terms = self._terms
        yield Open(
            handoff_id=terms.handoff_id,
            generation=self._reservation.generation,
            contract_digest=terms.contract_digest,
        )
        async for ready in self._ready_blocks(computed):
            for layer in self._layers:
                needed = range(max(ready.start, layer.first_block), ready.stop)
                for blocks in split_blocks(
                    needed, blocks_per_chunk(layer, self._reservation.chunk_cap_bytes)
                ):
                    yield await self._chunk(layer, blocks, read)
        self.first_token_id = await asyncio.shield(first_token)
        yield Commit(
            chunk_count=self.chunk_count,
            payload_bytes=self.payload_bytes,
            first_token_id=self.first_token_id,
            witnesses=witnesses(),
        )

    async def settled(self) -> None:
        """Returns when no thread reads the writer's cache for this handoff any more."""
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])

    async def _ready_blocks(self, computed: AsyncIterator[int]) -> AsyncIterator[range]:
        """Ranges of blocks whose tokens are all computed; together they are the prompt's blocks."""
        prompt_tokens, sent = len(self._terms.token_ids), 0
        async for tokens in computed:
            whole = tokens >= prompt_tokens
            if whole:
                self.computed_s = self._clock.now()
            ready = block_count(prompt_tokens, self._block_size) if whole else tokens // self._block_size
            if ready > sent:
                yield range(sent, ready)
                sent = ready
            if whole:
                return

    async def _chunk(self, layer: LayerBlocks, blocks: range, read: BlockReader) -> Chunk:
        if self.started_s is None:
            self.started_s = self._clock.now()
        make = partial(self._read_chunk, self.chunk_count, layer, blocks, read)
        self._reading = asyncio.get_running_loop().run_in_executor(self._executor, make)
        chunk = await asyncio.shield(self._reading)
        self.chunk_count += 1
        self.payload_bytes += chunk.header.key_bytes + chunk.header.value_bytes
        return chunk

    def _read_chunk(self, sequence: int, layer: LayerBlocks, blocks: range, read: BlockReader) -> Chunk:
        keys, values = read(layer.layer, blocks)
        header = ChunkHeader(
            handoff_id=self._terms.handoff_id,
            generation=self._reservation.generation,
            sequence=sequence,
            layer=layer.layer,
            block_start=blocks.start,
            block_count=len(blocks),
            key_bytes=memoryview(keys).nbytes,
            value_bytes=memoryview(values).nbytes,
        )
        terms = self._terms
        checksum = chunk_checksum(header, terms.contract_digest, terms.token_digest, keys, values)
        return Chunk(header=header, checksum=checksum, keys=keys, values=values)
