"""Chunks: sizes follow the layout, splits cover each block once, and a checksum moves with every field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.errors import BadRequest
from kvpact.handoff.chunks import (
    PAYLOAD_CAP_BYTES,
    LayerBlocks,
    block_count,
    blocks_per_chunk,
    chunk_checksum,
    layer_blocks,
    split_blocks,
)
from kvpact.handoff.messages import RequiredPositions
from kvpact.types import ContractDigest, Dtype
from tests.factories import make_contract, make_group, with_layout
from tests.handoff_samples import WRITER_DIGEST, full_chunk

TOKENS = b"t" * 32


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (50, 4)])
def test_a_partial_block_counts_as_a_block(tokens: int, blocks: int) -> None:
    assert block_count(tokens, 16) == blocks


def test_bytes_of_a_block_are_what_the_layout_implies() -> None:
    contract = with_layout(make_contract(key_dim=16, value_dim=8, kv_heads=2), value_dtype=Dtype.BFLOAT16)
    assert layer_blocks(contract, ()) == tuple(
        LayerBlocks(layer=layer, key_bytes=16 * 2 * 16 * 4, value_bytes=16 * 2 * 8 * 2, first_block=0)
        for layer in (0, 1)
    )


def test_layers_ascend_and_skip_what_the_shard_lacks() -> None:
    contract = make_contract(layer_groups=(make_group(layers=(0, 3)), make_group(layers=(1, 2), key_dim=8)))
    shard = replace(contract.layout.shard, layer_start=1, layer_end=4)
    layers = layer_blocks(with_layout(contract, shard=shard), (RequiredPositions(group=1, start=33, end=50),))
    assert [(layer.layer, layer.first_block) for layer in layers] == [(1, 2), (2, 2), (3, 0)]


def test_a_chunk_holds_what_fits_under_the_cap_and_one_block_at_least() -> None:
    layer = LayerBlocks(layer=0, key_bytes=3000, value_bytes=1000, first_block=0)
    assert [blocks_per_chunk(layer, cap) for cap in (1, 3999, 4000, 8000, 11999)] == [1, 1, 1, 2, 2]


def test_a_block_that_no_message_holds_is_refused() -> None:
    layer = LayerBlocks(layer=5, key_bytes=PAYLOAD_CAP_BYTES, value_bytes=1, first_block=0)
    with pytest.raises(BadRequest, match="smaller block_size") as refused:
        blocks_per_chunk(layer, 1 << 20)
    assert refused.value.param == "block_size"


def test_a_range_is_split_into_consecutive_parts() -> None:
    assert list(split_blocks(range(3, 10), 3)) == [range(3, 6), range(6, 9), range(9, 10)]
    assert list(split_blocks(range(3, 3), 3)) == []


@pytest.mark.parametrize(
    "field",
    ["generation", "sequence", "layer", "block_start", "block_count", "key_bytes", "value_bytes"],
)
def test_a_checksum_depends_on_each_number_of_the_header(field: str) -> None:
    chunk = full_chunk()
    other = replace(chunk.header, **{field: getattr(chunk.header, field) + 1})
    assert chunk_checksum(other, WRITER_DIGEST, TOKENS, chunk.keys, chunk.values) != chunk.checksum


def test_a_checksum_depends_on_handoff_contract_tokens_and_every_byte() -> None:
    chunk = full_chunk()
    header, keys, values = chunk.header, chunk.keys, chunk.values
    sums = {
        chunk_checksum(header, WRITER_DIGEST, TOKENS, keys, values),
        chunk_checksum(replace(header, handoff_id=b"x" * 16), WRITER_DIGEST, TOKENS, keys, values),
        chunk_checksum(header, ContractDigest(b"x" * 32), TOKENS, keys, values),
        chunk_checksum(header, WRITER_DIGEST, b"u" * 32, keys, values),
        chunk_checksum(header, WRITER_DIGEST, TOKENS, b"\x01" + bytes(keys[1:]), values),
        chunk_checksum(header, WRITER_DIGEST, TOKENS, keys, bytes(values[:-1]) + b"\x00"),
    }
    assert len(sums) == 6
    assert chunk.checksum in sums


def test_a_checksum_depends_on_each_scale_and_on_whose_it_is() -> None:
    chunk = full_chunk()
    splits = [
        ((), ()),
        ((0.5, 2.0), ()),
        ((0.5,), (2.0,)),
        ((), (0.5, 2.0)),
        ((0.5,), (3.0,)),
        ((2.0,), (0.5,)),
    ]
    headers = [replace(chunk.header, key_scales=keys, value_scales=values) for keys, values in splits]
    sums = {chunk_checksum(header, WRITER_DIGEST, TOKENS, chunk.keys, chunk.values) for header in headers}
    assert len(sums) == len(splits)


def test_a_checksum_is_that_of_the_bytes_in_a_row() -> None:
    chunk = full_chunk()
    whole = memoryview(bytes(chunk.keys) + bytes(chunk.values))
    again = chunk_checksum(chunk.header, WRITER_DIGEST, TOKENS, whole[:5], whole[5:])
    assert again == chunk.checksum == 4079373551154904906
