"""Where chunks lie in a handoff's region: behind each other, each at a multiple of ALIGNMENT."""

from __future__ import annotations

from collections.abc import Iterable

from kvpact.errors import BadRequest
from kvpact.handoff.chunks import LayerBlocks

ALIGNMENT = 64
PAYLOAD_START = 64
"""Offset of the first chunk; what stands before it is the transport's own."""


def aligned(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def region_bytes(layers: Iterable[LayerBlocks], block_count: int) -> int:
    """Bytes that the chunks of a prompt of `block_count` blocks take at most, however they are cut."""
    return PAYLOAD_START + sum(
        aligned(layer.block_bytes) * max(0, block_count - layer.first_block) for layer in layers
    )


def check_inside(offset: int, size_bytes: int, length: int) -> None:
    """Raises BadRequest unless `size_bytes` from `offset` on lie in the payload of a region of `length`."""
    if offset < PAYLOAD_START or size_bytes < 0 or offset + size_bytes > length:
        raise BadRequest(
            f"chunk.region_offset is {offset} for {size_bytes} bytes; the region's payload is "
            f"[{PAYLOAD_START}, {length})",
            param="chunk.region_offset",
        )
