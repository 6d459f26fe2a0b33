"""Parts of one push as the writer makes them: open, chunks of blocks that are ready, commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
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
from kvpact.handoff.lane import Lane
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
from kvpact.handoff.region_layout import PAYLOAD_START, aligned, region_bytes
from kvpact.handoff.regions import Cargo, Carrier

CHUNKS_AHEAD = 2
"""Chunks with payloads of their own that are read, or wait to be sent, while one is being sent."""


class BlockReader(Protocol):
    """Reads the writer's cache, one call at a time for each handoff, on executor threads; see `lends`."""

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """Keys and values of `blocks`, counted from 0 in the prompt's sequence, as stored and without gaps.

        The buffers stay valid and unchanged until the handoff ends.
        """

    def lends(self, layer: int, blocks: range) -> bool:
        """Whether a call gives views of these blocks and copies nothing; then it comes on the event loop."""

    def into(self, layer: int, blocks: range, keys: memoryview, values: memoryview) -> None:
        """The same, written into buffers of exactly that many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a commit shows of a prompt's computation."""

    rows: tuple[Witness, ...] = ()
    first_computed_tokens: int = 0
    """First prompt token that was computed; those before came from the writer's own cache."""


ShowWitnesses = Callable[[], Shown]


def show_none() -> Shown:
    """No rows; a reader that checks refuses such a handoff."""
    return Shown()


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
        self._layers = layer_blocks(
            contract, terms.required, terms.positions, held_tokens=reservation.held_prefix_tokens
        )
        self._clock = clock
        self._executor = executor
        self._cargo: Cargo | None = None
        self._lane: Lane | None = None
        self._free_from = PAYLOAD_START
        """Offset behind the last chunk in the region."""
        self.chunk_count = 0
        self.payload_bytes = 0
        self.first_token_id: int | None = None
        self.started_s: float | None = None
        """Clock time of the first chunk."""
        self.computed_s: float | None = None
        """Clock time at which the whole prompt was computed."""

    async def load(self, carrier: Carrier) -> None:
        """Makes payloads go into a region; else they travel in the messages. Before `parts`, once.

        Raises:
            Exhausted, Unavailable: there is no room for it.
        """
        blocks = block_count(len(self._terms.token_ids), self._block_size)
        chunk_bytes = max(
            aligned(min(blocks, self._most_blocks(layer, beside=True)) * layer.block_bytes)
            for layer in self._layers
        )
        self._cargo = await carrier.load(
            self._reservation.nixl, region_bytes(self._layers, blocks), chunk_bytes
        )

    def still(self) -> bool:
        """Whether nothing moves into the reader's region any more."""
        return self._cargo is None or self._cargo.still()

    def unload(self, *, acknowledged: bool) -> None:
        """Ends the region, once no thread fills it. `acknowledged`: the reader is done with it."""
        if self._cargo is not None:
            self._cargo.close(acknowledged=acknowledged)

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
            shm=None if self._cargo is None else self._cargo.segment,
        )
        self._lane = Lane(self._executor)
        async for ready in self._ready_blocks(computed):
            async for chunk in self._ahead(self._lane, self._cut(ready), read):
                self.payload_bytes += chunk.header.key_bytes + chunk.header.value_bytes
                yield chunk
        self.first_token_id = await asyncio.shield(first_token)
        shown = witnesses()
        yield Commit(
            chunk_count=self.chunk_count,
            payload_bytes=self.payload_bytes,
            first_token_id=self.first_token_id,
            witnesses=shown.rows,
            first_computed_tokens=shown.first_computed_tokens,
        )

    async def settled(self) -> None:
        """Returns when no thread reads the writer's cache for this handoff any more."""
        if self._lane is not None:
            await self._lane.end()

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

    def _cut(self, ready: range) -> Iterator[tuple[LayerBlocks, range]]:
        """The chunks of some blocks: layer by layer, as many blocks in each as the reservation allows."""
        for layer in self._layers:
            needed = range(max(ready.start, layer.first_block), ready.stop)
            for blocks in split_blocks(needed, self._most_blocks(layer, beside=self._cargo is not None)):
                yield layer, blocks

    def _most_blocks(self, layer: LayerBlocks, *, beside: bool) -> int:
        """Blocks in one chunk; those that travel beside the messages know no message's limit."""
        cap_bytes = self._reservation.chunk_cap_bytes
        return max(1, cap_bytes // layer.block_bytes) if beside else blocks_per_chunk(layer, cap_bytes)

    async def _ahead(
        self, lane: Lane, places: Iterable[tuple[LayerBlocks, range]], read: BlockReader
    ) -> AsyncIterator[Chunk]:
        """Chunks in order; some more are read while one is on its way."""
        most = CHUNKS_AHEAD if self._cargo is None else self._cargo.chunks_ahead
        reading: deque[asyncio.Future[Chunk]] = deque()
        for layer, blocks in places:
            if len(reading) == most:
                yield await self._shipped(reading.popleft())
            brief = self._cargo is None and read.lends(layer.layer, blocks)
            reading.append(lane.put(self._job(layer, blocks, read), brief=brief))
        while reading:
            yield await self._shipped(reading.popleft())

    async def _shipped(self, reading: asyncio.Future[Chunk]) -> Chunk:
        chunk = await asyncio.shield(reading)
        if self._cargo is not None and chunk.region_offset is not None:
            payload_bytes = chunk.header.key_bytes + chunk.header.value_bytes
            await self._cargo.ship(chunk.region_offset, payload_bytes)
        return chunk

    def _job(self, layer: LayerBlocks, blocks: range, read: BlockReader) -> Callable[[], Chunk]:
        """What makes a chunk on a thread; its number and its place are fixed here."""
        if self.started_s is None:
            self.started_s = self._clock.now()
        sequence, self.chunk_count = self.chunk_count, self.chunk_count + 1
        if self._cargo is None:
            return partial(self._read_inline, sequence, layer.layer, blocks, read)
        offset, size_bytes = self._free_from, layer.block_bytes * len(blocks)
        self._free_from = offset + aligned(size_bytes)
        return partial(self._read_into, sequence, layer, blocks, read, self._cargo, offset)

    def _read_inline(self, sequence: int, layer: int, blocks: range, read: BlockReader) -> Chunk:
        keys, values = read(layer, blocks)
        return self._chunk(sequence, layer, blocks, keys, values, None)

    def _read_into(
        self,
        sequence: int,
        layer: LayerBlocks,
        blocks: range,
        read: BlockReader,
        cargo: Cargo,
        offset: int,
    ) -> Chunk:
        space = cargo.space(offset, layer.block_bytes * len(blocks))
        key_bytes = layer.key_bytes * len(blocks)
        keys, values = space[:key_bytes], space[key_bytes:]
        read.into(layer.layer, blocks, keys, values)
        return self._chunk(sequence, layer.layer, blocks, keys, values, offset)

    def _chunk(
        self, sequence: int, layer: int, blocks: range, keys: Buffer, values: Buffer, offset: int | None
    ) -> Chunk:
        header = ChunkHeader(
            handoff_id=self._terms.handoff_id,
            generation=self._reservation.generation,
            sequence=sequence,
            layer=layer,
            block_start=blocks.start,
            block_count=len(blocks),
            key_bytes=memoryview(keys).nbytes,
            value_bytes=memoryview(values).nbytes,
        )
        terms = self._terms
        checksum = chunk_checksum(header, terms.contract_digest, terms.token_digest, keys, values)
        return Chunk(header=header, checksum=checksum, keys=keys, values=values, region_offset=offset)
