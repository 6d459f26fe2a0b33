"""Chunks: how many bytes blocks of a layer take, how ranges of blocks are split, and the checksum of a chunk.

A chunk holds whole blocks [start, stop) of one layer, keys then values, as the writer stores them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest
from kvpact.handoff.messages import Buffer, ChunkHeader, RequiredPositions
from kvpact.types import DTYPE_BYTES, ContractDigest

MESSAGE_CAP_BYTES = 4 << 20
"""gRPC's own limit on one message."""
FRAMING_BYTES = 4096
"""Room for everything but the payload in one message."""
PAYLOAD_CAP_BYTES = MESSAGE_CAP_BYTES - FRAMING_BYTES
_HEADER = struct.Struct("<16sqqqqqqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """What one layer of a prompt takes: bytes of a block, and the first block that the reader needs."""

    layer: int
    key_bytes: int
    value_bytes: int
    first_block: int

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block."""
        return self.key_bytes + self.value_bytes


def block_count(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def layer_blocks(contract: Contract, required: Iterable[RequiredPositions]) -> tuple[LayerBlocks, ...]:
    """Each layer that the writer's shard holds, ascending, with the block sizes that its layout implies."""
    layout, shard = contract.layout, contract.layout.shard
    rows = layout.block_size * (shard.head_end - shard.head_start)
    starts = {entry.group: entry.start for entry in required}
    layers = [
        LayerBlocks(
            layer=layer,
            key_bytes=rows * group.key_dim * DTYPE_BYTES[layout.key_dtype],
            value_bytes=rows * group.value_dim * DTYPE_BYTES[layout.value_dtype],
            first_block=starts.get(index, 0) // layout.block_size,
        )
        for index, group in enumerate(contract.layer_groups)
        for layer in group.layers
        if shard.layer_start <= layer < shard.layer_end
    ]
    return tuple(sorted(layers, key=lambda blocks: blocks.layer))


def blocks_per_chunk(blocks: LayerBlocks, chunk_cap_bytes: int) -> int:
    """Blocks of a layer that go into one chunk; one where a block alone passes the cap.

    Raises:
        BadRequest: not even one block fits into a message.
    """
    if blocks.block_bytes > PAYLOAD_CAP_BYTES:
        raise BadRequest(
            f"one block of layer {blocks.layer} takes {blocks.block_bytes} bytes, a message holds "
            f"{PAYLOAD_CAP_BYTES}; choose a smaller block_size",
            param="block_size",
        )
    return max(1, min(chunk_cap_bytes, PAYLOAD_CAP_BYTES) // blocks.block_bytes)


def split_blocks(blocks: range, most: int) -> Iterator[range]:
    """Consecutive ranges of at most `most` blocks that together are `blocks`."""
    for start in range(blocks.start, blocks.stop, most):
        yield range(start, min(start + most, blocks.stop))


def chunk_checksum(
    header: ChunkHeader, contract_digest: ContractDigest, token_digest: bytes, keys: Buffer, values: Buffer
) -> int:
    """xxh3_64 over header fields, both digests, keys and values."""
    state = xxhash.xxh3_64(
        _HEADER.pack(
            header.handoff_id,
            header.generation,
            header.sequence,
            header.layer,
            header.block_start,
            header.block_count,
            header.key_bytes,
            header.value_bytes,
        )
    )
    for data in (contract_digest, token_digest, keys, values):
        state.update(data)
    return int(state.intdigest())
