"""Which kept rows a writer shows of blocks that it took from its own cache: picked by the reader's nonce.

A cached block keeps the rows of one of its tokens, one row a layer, as they were captured when the block was
computed. Rows are dealt over layers, as many as take 1 % of a handoff of 512 tokens and at least one in each
group of layers, and over the cached blocks in turn: in a group no block is shown twice before each was shown
once. So a block that is stale in all layers is seen for certain where there are no more cached blocks than
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvpact.contract.content_identity import ContentId, kept_offset
from kvpact.contract.contract import Contract
from kvpact.contract.shards import holds_layer
from kvpact.contract.witness_places import MOST_ROWS, Place, budget_bytes, draws, row_bytes, shuffled

MOST_CACHED_BYTES = 1 << 20
"""These rows travel in one message with those of computed tokens."""


def cached_places(
    contract: Contract,
    nonce: bytes,
    names: Sequence[ContentId],
    *,
    prompt_tokens: int,
    blocks: range,
    first_blocks: Mapping[int, int],
) -> tuple[Place, ...]:
    """The kept rows to show, ascending; none where no cached block is sent.

    Args:
        names: of the prompt's whole blocks in the writer's block size.
        blocks: of the prompt, those that the writer took from its cache and the reader doesn't hold.
        first_blocks: layer -> first block that is sent of it; absent means 0.
    """
    draw = draws(b"kvpact cached", nonce, prompt_tokens)
    size = contract.layout.block_size
    budget = min(budget_bytes(contract), MOST_CACHED_BYTES)
    places: list[Place] = []
    for group in contract.layer_groups:
        layers = shuffled(
            [layer for layer in group.layers if holds_layer(contract.layout.shard, layer)], draw
        )
        first = max((first_blocks.get(layer, 0) for layer in layers), default=0)
        shown = shuffled(range(max(first, blocks.start), blocks.stop), draw)
        share = budget * len(layers) // contract.layer_count()
        for layer, block in _pairs(layers, shown, max(1, share // row_bytes(contract, group))):
            token = block * size + kept_offset(names[block], size)
            places.append(Place(layer=layer, token=token))
    return tuple(sorted(places))


def _pairs(layers: Sequence[int], blocks: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Distinct pairs of a layer and a block, each round over the layers and over the blocks a whole one."""
    if not layers or not blocks:
        return
    cycle = math.lcm(len(layers), len(blocks))
    for number in range(min(most, len(layers) * min(MOST_ROWS, len(blocks)))):
        yield layers[number % len(layers)], blocks[(number + number // cycle) % len(blocks)]
