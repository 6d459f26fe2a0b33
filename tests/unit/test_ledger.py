"""The ledger counts what the seed's formulas say, in the contract's own dtypes, windows and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.contract import Contract
from kvpact.contract.ledger import ledger
from kvpact.contract.reach import attended_pairs, first_reachable
from kvpact.errors import BadRequest
from kvpact.handoff.chunks import block_count, layer_blocks
from kvpact.handoff.terms import required_positions
from kvpact.types import Dtype, KeyState, LayerKind
from tests.factories import make_contract, make_group, make_rotary, with_layout


def test_one_dtype_gives_two_l_h_d_n_s() -> None:
    costs = ledger(make_contract(layers=30, kv_heads=3, key_dim=64, dtype=Dtype.BFLOAT16), 513)
    assert costs.cache_bytes == 2 * 30 * 3 * 64 * 513 * 2
    assert costs.rephase_lanes == 30 * 3 * 64 * 513
    assert costs.attention_pairs == 30 * 3 * 513 * 514 // 2
    assert costs.attention_multiplies == costs.attention_pairs * 128


def test_other_dims_and_dtypes_are_counted_as_they_are() -> None:
    contract = with_layout(
        make_contract(key_dim=16, value_dim=8, rotary_dim=4), key_dtype=Dtype.FLOAT32, value_dtype=Dtype.INT8
    )
    costs = ledger(contract, 10)
    assert (costs.key_bytes, costs.value_bytes) == (2 * 2 * 16 * 10 * 4, 2 * 2 * 8 * 10 * 1)
    assert costs.rephase_lanes == 2 * 2 * 4 * 10


def windowed() -> Contract:
    """One full layer, one that sees 8 keys, one that sees chunks of 32, one without rotation."""
    groups = (
        make_group(layers=(0,)),
        make_group(layers=(1,), kind=LayerKind.SLIDING, window=8),
        make_group(layers=(2,), kind=LayerKind.CHUNKED, window=32),
        make_group(layers=(3,), rotary=make_rotary(key_state=KeyState.NONE)),
    )
    return make_contract(layer_groups=groups)


@pytest.mark.parametrize("tokens", [1, 7, 8, 15, 16, 17, 31, 32, 33, 100])
def test_the_handoff_is_what_the_sender_would_push(tokens: int) -> None:
    contract = windowed()
    blocks = block_count(tokens, contract.layout.block_size)
    layers = layer_blocks(contract, required_positions(contract, tokens))
    costs = ledger(contract, tokens)
    assert costs.handoff_bytes == sum(each.block_bytes * (blocks - each.first_block) for each in layers)
    assert costs.block_count == blocks
    assert costs.cache_bytes <= costs.allocated_bytes


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 31, 32, 33, 70])
def test_attended_pairs_are_those_that_a_mask_would_show(tokens: int) -> None:
    for group in windowed().layer_groups:
        seen = sum(query - max(0, first_reachable(group, query)) + 1 for query in range(tokens))
        assert attended_pairs(group, tokens) == seen


def test_a_layer_without_rotation_has_nothing_to_turn() -> None:
    assert ledger(windowed(), 10).rephase_lanes == 3 * 2 * 16 * 10


def test_a_shard_counts_what_it_holds() -> None:
    whole = make_contract(layers=4, kv_heads=4)
    shard = replace(whole.layout.shard, head_end=1, layer_start=1, layer_end=3)
    assert ledger(with_layout(whole, shard=shard), 20).cache_bytes * 8 == ledger(whole, 20).cache_bytes


def test_rephasing_grows_with_n_and_prefill_with_n_squared() -> None:
    short, long = ledger(make_contract(), 1000), ledger(make_contract(), 2000)
    assert long.rephase_lanes == 2 * short.rephase_lanes
    assert long.attention_pairs / short.attention_pairs == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("tokens", [0, -1])
def test_no_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(BadRequest, match="at least 1"):
        ledger(make_contract(), tokens)
