"""Caches without an engine for the handoff benchmark: SmolLM2-135M's in shape, as long as a payload needs.

Legend: T tokens, H KV heads, D lanes of a head.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.contract_cases import HEADS, WIDTH, Form, contract_of
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.witness_places import Place
from kvpact.handoff.messages import Buffer, Witness
from kvpact.kvcache.paged_cache import PagedCache

LAYERS, BLOCK_TOKENS = 30, 16
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4
PART_BYTES = BLOCK_TOKENS * HEADS * WIDTH * 4
"""Keys, or values, of one block of one layer."""


def blocks_for(payload_bytes: int) -> int:
    """Blocks that hold that many bytes of tokens."""
    return -(-payload_bytes // (TOKEN_BYTES * BLOCK_TOKENS))


def contract_for(most_bytes: int) -> Contract:
    """Both sides' contract, with a context that the largest payload fits into."""
    contract = contract_of(Form(block_size=BLOCK_TOKENS), layers=LAYERS)
    context_tokens = (blocks_for(most_bytes) + 1) * BLOCK_TOKENS
    return dataclasses.replace(
        contract, model=dataclasses.replace(contract.model, context_tokens=context_tokens)
    )


def faulted_cache(contract: Contract, blocks: int) -> PagedCache:
    """A cache whose pages are there already, as those of a worker that has served for a while."""
    cache = PagedCache(contract, blocks, torch.device("cpu"))
    for layer in range(contract.layer_count()):
        for storage in cache.storage(layer):
            storage.fill_(1.0)
    return cache


class WriterCache:
    """A full cache and its witness rows; a BlockReader of itself.

    Every layer has the same rows: raw keys, which double as values, and those turned by the table.
    """

    def __init__(self, contract: Contract, most_bytes: int) -> None:
        blocks = blocks_for(most_bytes)
        self._cache = faulted_cache(contract, blocks)
        generator = torch.Generator().manual_seed(0)
        self._raw_THD = torch.randn((blocks * BLOCK_TOKENS, HEADS, WIDTH), generator=generator)
        rotary = contract.layer_groups[0].rotary
        positions_T = torch.arange(blocks * BLOCK_TOKENS)
        self._turned_THD = rotate(self._raw_THD, rotation_at(rotary, rotary.tables[0], positions_T))
        for layer in range(LAYERS):
            self._cache.write(layer, torch.arange(blocks), 0, self._turned_THD, self._raw_THD)

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """See BlockReader."""
        return self._cache.read_blocks(layer, torch.arange(blocks.start, blocks.stop))

    def lends(self, layer: int, blocks: range) -> bool:
        """See BlockReader."""
        return self._cache.lends(torch.arange(blocks.start, blocks.stop))

    def into(self, layer: int, blocks: range, keys: memoryview, values: memoryview) -> None:
        """See BlockReader."""
        self._cache.read_blocks_into(layer, torch.arange(blocks.start, blocks.stop), keys, values)

    def witness(self, place: Place) -> Witness:
        """The row that a commit shows of a place; tokens stand from 0 without gaps."""
        return Witness(
            layer=place.layer,
            position=place.token,
            raw_key=self._raw_THD[place.token].numpy().tobytes(),
            attended_key=self._turned_THD[place.token].numpy().tobytes(),
            value=self._raw_THD[place.token].numpy().tobytes(),
        )
