"""Chunks of a writer that stores alike land as they are; the others go through a conversion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decode_worker.landing import CacheLanding, CacheLandingHandle
from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter
from kvpact.contract.identity import contract_digest
from kvpact.handoff.messages import ChunkHeader
from kvpact.handoff.terms import make_terms
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import AxisOrder, BlockId, Dtype, HandoffId, KeyState, LaneOrder, WorkerLife
from tests.factories import make_contract

TOKENS, SIZE = 40, 16
CPU = torch.device("cpu")


def handle_of(writer: Contract, cache: PagedCache, blocks: list[int], held: int = 0) -> CacheLandingHandle:
    lives = [WorkerLife(worker=name, incarnation=bytes(16)) for name in ("w", "r")]
    terms = make_terms(
        handoff_id=HandoffId(bytes(16)),
        writer=lives[0],
        reader=lives[1],
        contract=writer,
        contract_digest=contract_digest(writer),
        token_ids=range(TOKENS),
        table_length=TOKENS + 1,
    )
    verdict = compare(writer, cache.contract, Policy(), TOKENS + 1)
    places = [BlockId(block) for block in blocks]
    return CacheLanding(cache).prepare(writer, verdict, terms, places, held_tokens=held)


def header_of(cache: PagedCache, layer: int, start: int, count: int) -> ChunkHeader:
    key_bytes, value_bytes = (count * each for each in cache.block_bytes(layer))
    return ChunkHeader(
        handoff_id=HandoffId(bytes(16)),
        generation=1,
        sequence=0,
        layer=layer,
        block_start=start,
        block_count=count,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
    )


def full_cache(contract: Contract, seed: int) -> PagedCache:
    """Noise everywhere, behind the prompt too."""
    cache, generator = PagedCache(contract, 6, CPU), torch.Generator().manual_seed(seed)
    for layer in range(contract.layer_count()):
        for storage in cache.storage(layer):
            storage.copy_(torch.randn(storage.shape, generator=generator))
    return cache


def hand_over(writer: PagedCache, reader: PagedCache, blocks: list[int]) -> CacheLandingHandle:
    """Blocks 1, 2, 3 of the writer land in `blocks` of the reader, by two chunks a layer."""
    handle = handle_of(writer.contract, reader, blocks)
    for layer in range(reader.contract.layer_count()):
        for start, count in ((0, 2), (2, 1)):
            keys, values = writer.read_blocks(layer, torch.arange(1 + start, 1 + start + count))
            framed = b"x" + bytes(keys) + bytes(values)
            payload = memoryview(framed)[1:]
            header = header_of(writer, layer, start, count)
            handle.land(header, payload[: len(keys)], payload[len(keys) :])
    handle.finish(TOKENS)
    return handle


@pytest.mark.parametrize("blocks", [[2, 3, 4], [5, 0, 3], [1, 3, 2]])
@pytest.mark.parametrize("axis_order", list(AxisOrder))
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_blocks_of_a_writer_that_stores_alike_land_as_they_are(
    dtype: Dtype, axis_order: AxisOrder, blocks: list[int]
) -> None:
    contract = make_contract(dtype=dtype, axis_order=axis_order)
    writer, reader, before = (full_cache(contract, seed) for seed in (1, 2, 2))
    assert hand_over(writer, reader, blocks).brief
    others = [block for block in range(6) if block not in blocks]
    for layer in range(contract.layer_count()):
        every = zip(writer.storage(layer), reader.storage(layer), before.storage(layer), strict=True)
        for sent, landed, old in every:
            assert torch.equal(landed[others], old[others])
            assert torch.equal(landed[blocks[:2]], sent[1:3])
            last, of_sent = landed[blocks[2]], sent[3]
            if axis_order is AxisOrder.HND:
                last, of_sent = last.transpose(0, 1), of_sent.transpose(0, 1)
            assert torch.equal(last[: TOKENS % SIZE], of_sent[: TOKENS % SIZE])
            assert not last[TOKENS % SIZE :].any()


def other_axes() -> Contract:
    return make_contract(axis_order=AxisOrder.HND)


def other_blocks() -> Contract:
    return make_contract(block_size=8)


def other_numbers() -> Contract:
    return make_contract(dtype=Dtype.BFLOAT16)


def other_lanes() -> Contract:
    return make_contract(stored_lane_order=LaneOrder.ADJACENT)


def keys_not_turned() -> Contract:
    return make_contract(key_state=KeyState.RAW)


@pytest.mark.parametrize(
    "writer",
    [other_axes, other_blocks, other_numbers, other_lanes, keys_not_turned],
    ids=lambda it: it.__name__,
)
def test_a_writer_that_stores_otherwise_is_converted(writer: Callable[[], Contract]) -> None:
    reader = make_contract()
    assert Converter(reader, reader).copies_blocks()
    assert not Converter(writer(), reader).copies_blocks()
    assert not handle_of(writer(), PagedCache(reader, 6, CPU), [1, 2, 3]).brief


def test_a_chunk_behind_a_held_prefix_leaves_the_shared_blocks_alone() -> None:
    contract = make_contract()
    writer, reader, before = (full_cache(contract, seed) for seed in (1, 2, 2))
    handle = handle_of(contract, reader, [4, 0, 1], held=SIZE)
    for layer in range(contract.layer_count()):
        handle.land(header_of(writer, layer, 1, 2), *writer.read_blocks(layer, torch.tensor([2, 3])))
        assert torch.equal(reader.storage(layer)[0][4], before.storage(layer)[0][4])
        assert torch.equal(reader.storage(layer)[0][[0, 1]], writer.storage(layer)[0][[2, 3]])
