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


def test_bytes_that_were_read_are_a_copy() -> None:
    cache = PagedCache(contract_of(AxisOrder.NHD), 6, CPU)
    cache.write(0, BLOCKS, 0, tokens_of(12), tokens_of(12))
    keys, _ = cache.read_blocks(0, BLOCKS)
    before = bytes(keys)
    cache.zero_tail(BLOCKS, 0)
    assert bytes(keys) == before


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
