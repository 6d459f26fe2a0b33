"""What is written under one layout lies where the contract says and is read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import AxisOrder, BlockId, ByteOrder, Dtype, Packing
from tests.factories import make_contract

HEADS, LANES = 2, 16
CPU = torch.device("cpu")
BLOCKS = torch.tensor([5, 0, 3])


def contract_of(axis_order: AxisOrder, block_size: int = 4, dtype: Dtype = Dtype.FLOAT32) -> Contract:
    return make_contract(axis_order=axis_order, block_size=block_size, dtype=dtype)


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, HEADS, LANES), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("axis_order", list(AxisOrder))
def test_a_block_holds_its_axes_in_the_contracts_order(axis_order: AxisOrder) -> None:
    cache = PagedCache(contract_of(axis_order), 6, CPU)
    k_THD, v_THD = tokens_of(10), tokens_of(10, seed=1)
    cache.write(1, BLOCKS, 0, k_THD, v_THD)
    for payload, x_THD in zip(cache.read_blocks(1, BLOCKS), (k_THD, v_THD), strict=True):
        blocks = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        shape = (3, 4, HEADS, LANES) if axis_order is AxisOrder.NHD else (3, HEADS, 4, LANES)
        blocks = blocks.view(shape) if axis_order is AxisOrder.NHD else blocks.view(shape).transpose(1, 2)
        assert torch.equal(blocks.flatten(0, 1)[:10], x_THD)
        assert not blocks.flatten(0, 1)[10:].any()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("chosen", [[4, 1, 3], [2, 3, 4], [3, 3, 5], [5]])
def test_blocks_read_into_a_caller_s_buffers_are_those_that_are_read(dtype: Dtype, chosen: list[int]) -> None:
    cache = PagedCache(contract_of(AxisOrder.NHD, dtype=dtype), 6, CPU)
    cache.write(1, torch.arange(6), 0, tokens_of(24), tokens_of(24, seed=1))
    blocks = torch.tensor(chosen)
    keys, values = cache.read_blocks(1, blocks)
    area = memoryview(bytearray(keys.nbytes + values.nbytes + 2))
    cache.read_blocks_into(1, blocks, area[1 : 1 + keys.nbytes], area[1 + keys.nbytes : -1])
    assert bytes(area) == b"\0" + bytes(keys) + bytes(values) + b"\0"


@pytest.mark.parametrize("axis_order", list(AxisOrder))
def test_tokens_written_in_pieces_are_read_as_one(axis_order: AxisOrder) -> None:
    cache = PagedCache(contract_of(axis_order), 6, CPU)
    k_THD, v_THD = tokens_of(11), tokens_of(11, seed=1)
    for start, end in ((0, 3), (3, 9), (9, 11)):
        cache.write(0, BLOCKS, start, k_THD[start:end], v_THD[start:end])
    blocks = [BlockId(block) for block in BLOCKS.tolist()]
    rows_HT = cache.rows(cache.slots(blocks, 0, 11), HEADS)
    assert torch.equal(cache.keys_at(0, rows_HT).transpose(0, 1), k_THD)
    assert torch.equal(cache.values_at(0, rows_HT).transpose(0, 1), v_THD)


@pytest.mark.parametrize("axis_order", list(AxisOrder))
def test_zeroing_the_tail_leaves_the_valid_tokens_of_every_layer(axis_order: AxisOrder) -> None:
    cache = PagedCache(contract_of(axis_order), 6, CPU)
    ones = torch.ones((12, HEADS, LANES))
    for layer in range(2):
        cache.write(layer, BLOCKS, 0, ones, ones)
    cache.zero_tail(BLOCKS, 9)
    for layer in range(2):
        for payload in cache.read_blocks(layer, BLOCKS):
            assert torch.frombuffer(bytearray(payload), dtype=torch.float32).sum() == 9 * HEADS * LANES


def test_other_blocks_are_not_touched() -> None:
    cache = PagedCache(contract_of(AxisOrder.HND), 6, CPU)
    cache.write(0, BLOCKS, 0, tokens_of(12), tokens_of(12))
    untouched = torch.tensor([1, 2, 4])
    assert not any(bytes(payload).strip(b"\0") for payload in cache.read_blocks(0, untouched))


def test_bfloat16_blocks_are_rounded_and_half_as_large() -> None:
    cache = PagedCache(contract_of(AxisOrder.NHD, dtype=Dtype.BFLOAT16), 6, CPU)
    k_THD = tokens_of(4)
    cache.write(0, BLOCKS[:1], 0, k_THD, k_THD)
    keys, values = cache.read_blocks(0, BLOCKS[:1])
    assert keys.nbytes == values.nbytes == 4 * HEADS * LANES * 2
    assert cache.block_bytes(0) == (keys.nbytes, values.nbytes)
    assert torch.equal(torch.frombuffer(bytearray(keys), dtype=torch.bfloat16), k_THD.bfloat16().flatten())


@pytest.mark.parametrize("chosen", [[5, 0, 3], [1, 3, 2, 4], [4, 4]])
def test_bytes_of_scattered_blocks_are_a_copy(chosen: list[int]) -> None:
    cache, blocks = PagedCache(contract_of(AxisOrder.NHD), 6, CPU), torch.tensor(chosen)
    cache.write(0, blocks, 0, tokens_of(8), tokens_of(8))
    assert not cache.lends(blocks)
    keys, _ = cache.read_blocks(0, blocks)
    before = bytes(keys)
    cache.zero_tail(blocks, 0)
    assert bytes(keys) == before


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("chosen", [[2, 3, 4], [5]])
def test_bytes_of_adjacent_blocks_are_the_caches_own(dtype: Dtype, chosen: list[int]) -> None:
    cache, blocks = PagedCache(contract_of(AxisOrder.NHD, dtype=dtype), 6, CPU), torch.tensor(chosen)
    cache.write(0, blocks, 0, tokens_of(4), tokens_of(4, seed=1))
    assert cache.lends(blocks)
    for part, storage in zip(cache.read_blocks(0, blocks), cache.storage(0), strict=True):
        assert part.readonly
        assert bytes(part) == storage[blocks].view(torch.uint8).numpy().tobytes()
        assert any(part)
    keys, _ = cache.read_blocks(0, blocks)
    cache.zero_tail(blocks, 0)
    assert not any(keys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packing", Packing.PACKED),
        ("byte_order", ByteOrder.BIG),
        ("key_dtype", Dtype.INT8),
        ("value_dtype", Dtype.FLOAT8_E4M3),
    ],
)
def test_a_layout_that_can_not_be_kept_is_refused_by_name(field: str, value: object) -> None:
    contract = contract_of(AxisOrder.NHD)
    contract = replace(contract, layout=replace(contract.layout, **{field: value}))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=field):
        PagedCache(contract, 6, CPU)
