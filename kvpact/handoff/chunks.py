"""Chunks: how many bytes blocks of a layer take, how ranges of blocks are split, and the checksum of a chunk.

A chunk holds whole blocks [start, stop) of one layer, keys then values, as the writer stores them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.numbers import DTYPE_BYTES
from kvpact.contract.shards import held_heads
from kvpact.errors import BadRequest
from kvpact.handoff.messages import Buffer, ChunkHeader, RequiredPositions
from kvpact.types import ContractDigest, Packing, PositionRun

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


def layer_blocks(
    contract: Contract,
    required: Iterable[RequiredPositions],
    positions: Sequence[PositionRun] = (),
    *,
    held_tokens: int = 0,
) -> tuple[LayerBlocks, ...]:
    """Each layer that the writer's shard holds, ascending, with the block sizes that its layout implies.

    Args:
        positions: of the prompt's tokens; none means from 0 without gaps.
        held_tokens: prefix that the reader holds, in whole blocks of the writer; it isn't sent.
    """
    layout, shard = contract.layout, contract.layout.shard
    assert held_tokens % layout.block_size == 0, "a held prefix ends where a block of the writer ends"
    starts = {entry.group: tokens_before(positions, entry.start) for entry in required}
    layers = [
        LayerBlocks(
            layer=layer,
            **_block_bytes(contract, group),
            first_block=max(starts.get(index, 0), held_tokens) // layout.block_size,
        )
        for index, group in enumerate(contract.layer_groups)
        for layer in group.layers
        if shard.layer_start <= layer < shard.layer_end
    ]
    return tuple(sorted(layers, key=lambda blocks: blocks.layer))


def _block_bytes(contract: Contract, group: LayerGroup) -> dict[str, int]:
    """Bytes of one block; a packed one is keys' bytes as a whole."""
    layout = contract.layout
    rows = layout.block_size * len(held_heads(group, contract))
    key_bytes = rows * group.key_dim * DTYPE_BYTES[layout.key_dtype]
    value_bytes = rows * group.value_dim * DTYPE_BYTES[layout.value_dtype]
    if layout.packing is Packing.PACKED:
        return {"key_bytes": key_bytes + value_bytes, "value_bytes": 0}
    return {"key_bytes": key_bytes, "value_bytes": value_bytes}


def tokens_before(runs: Sequence[PositionRun], position: int) -> int:
    """Tokens of a prompt that stand before `position`; no runs means from 0 without gaps."""
    if not runs:
        return position
    return sum(min(run.count, max(0, position - run.start)) for run in runs)


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
    """xxh3_64 over header fields, both digests, keys and values; a chunk with scales adds them to its header.

    They go as two int64 counts, of keys' scales and of values', then all of them as float32.
    """
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
    scales = (*header.key_scales, *header.value_scales)
    if scales:
        counts = len(header.key_scales), len(header.value_scales)
        state.update(struct.pack(f"<2q{len(scales)}f", *counts, *scales))
    for data in (contract_digest, token_digest, keys, values):
        state.update(data)
    return int(state.intdigest())
