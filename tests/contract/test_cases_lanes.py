"""Pairs of lanes stored in another order: converted by moving lanes of keys, whatever the maths does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract, LatentDims
from kvpact.contract.convert import Converter, RotationCache
from kvpact.types import Dtype, Exactness, KeyState, LaneOrder, LayerKind, PlanOp, VerdictWord
from tests.factories import make_contract, make_group, make_rotary, with_rotary
from tests.reference_cache import in_lane_order, logits_of, pack, random_THD, stored_keys

torch.set_num_threads(1)
TOKENS = [1, 15, 16, 17, 31, 32, 33, 2048]
ORDERS = [(LaneOrder.ADJACENT, LaneOrder.HALF_SPLIT), (LaneOrder.HALF_SPLIT, LaneOrder.ADJACENT)]


def land(writer: Contract, reader: Contract, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """Keys of layer 0."""
    return Converter(writer, reader).convert(
        0,
        pack(k_THD, writer.layout),
        pack(v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=-(-len(k_THD) // writer.layout.block_size),
        positions_T=torch.arange(len(k_THD)),
        rotations=RotationCache(),
    )[0]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("writes", "reads"), ORDERS)
def test_eight_rotary_lanes_of_sixteen_are_put_in_the_readers_order(
    writes: LaneOrder, reads: LaneOrder, tokens: int
) -> None:
    writer, reader = (make_contract(rotary_dim=8, stored_lane_order=order) for order in (writes, reads))
    verdict = compare(writer, reader, Policy(), 4096)
    assert [part.field for part in verdict.differences] == ["stored_lane_order"]
    assert [(step.op, step.exactness) for step in verdict.plan] == [
        (PlanOp.REORDER_LANES, Exactness.BIT_EXACT)
    ]
    raw_THD, positions = random_THD(tokens=tokens), list(range(tokens))
    written, own = (
        stored_keys(in_lane_order(raw_THD, side.group_of(0).rotary), side, positions)
        for side in (writer, reader)
    )
    landed = land(writer, reader, written, raw_THD)
    assert torch.equal(landed, own)
    assert torch.equal(landed[..., 8:], raw_THD[..., 8:])
    if tokens > 1:
        assert not torch.equal(written, own)


@pytest.mark.parametrize(("writes", "reads"), ORDERS)
def test_reading_keys_in_the_wrong_lane_order_gives_other_logits(writes: LaneOrder, reads: LaneOrder) -> None:
    writer, reader = (make_contract(stored_lane_order=order) for order in (writes, reads))
    raw_THD, positions = random_THD(tokens=33), list(range(33))
    rotary = reader.group_of(0).rotary
    q_HD = stored_keys(in_lane_order(random_THD(tokens=1, seed=2), rotary), reader, [33])[0]
    written, own = (
        stored_keys(in_lane_order(raw_THD, side.group_of(0).rotary), side, positions)
        for side in (writer, reader)
    )
    right = logits_of(q_HD, own, 0.25)
    torch.testing.assert_close(logits_of(q_HD, land(writer, reader, written, raw_THD), 0.25), right)
    assert (logits_of(q_HD, written, 0.25) - right).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT8_E4M3])
def test_lanes_move_with_their_bits_in_every_dtype(dtype: Dtype) -> None:
    writer, reader = (make_contract(stored_lane_order=order, dtype=dtype) for order in LaneOrder)
    raw_THD = random_THD(tokens=17)
    written, own = (
        stored_keys(in_lane_order(raw_THD, side.group_of(0).rotary), side, [0] * 17)
        for side in (writer, reader)
    )
    landed = land(writer, reader, written, written)
    assert torch.equal(landed.view(torch.uint8), own.view(torch.uint8))


def test_interleaved_sections_of_positions_are_not_a_lane_order() -> None:
    writer, reader = (
        with_rotary(make_contract(), mrope_sections=(4, 2, 2), mrope_interleaved=flag)
        for flag in (False, True)
    )
    verdict = compare(writer, reader, Policy(), 64)
    assert (verdict.word, [part.field for part in verdict.differences]) == (
        VerdictWord.REJECT,
        ["mrope_sections"],
    )


def latent_contract(order: LaneOrder) -> Contract:
    """One latent row of 32 content lanes, then 8 rotary lanes, kept in `order`."""
    rotary = make_rotary(rotary_dim=8, lane_offset=32, stored_lane_order=order)
    group = make_group(kind=LayerKind.MLA_LATENT, kv_heads=4, key_dim=40, value_dim=32, rotary=rotary)
    latent = LatentDims(latent_dim=32, rope_dim=8, content_first=True)
    return make_contract(layer_groups=(replace(group, latent=latent),))


@pytest.mark.parametrize(("writes", "reads"), ORDERS)
def test_a_shared_rotary_row_that_was_stored_deinterleaved_is_put_back(
    writes: LaneOrder, reads: LaneOrder
) -> None:
    writer, reader = latent_contract(writes), latent_contract(reads)
    verdict = compare(writer, reader, Policy(), 64)
    assert [part.field for part in verdict.differences] == ["stored_lane_order"]
    raw_THD, positions = random_THD(tokens=33, heads=1, width=40), list(range(33))
    written, own = (
        stored_keys(in_lane_order(raw_THD, side.group_of(0).rotary), side, positions)
        for side in (writer, reader)
    )
    assert torch.equal(land(writer, reader, written, raw_THD[..., :32]), own)
    assert torch.equal(written[..., :32], own[..., :32])
    q_HD = random_THD(tokens=1, heads=1, width=40, seed=5)[0]
    assert (logits_of(q_HD, written, 0.2) - logits_of(q_HD, own, 0.2)).abs().max() > 0.1


def test_lanes_and_rotation_change_together() -> None:
    writer = make_contract(stored_lane_order=LaneOrder.ADJACENT)
    reader = make_contract(key_state=KeyState.RAW)
    raw_THD, positions = random_THD(tokens=33), list(range(33))
    written = stored_keys(in_lane_order(raw_THD, writer.group_of(0).rotary), writer, positions)
    torch.testing.assert_close(land(writer, reader, written, raw_THD), raw_THD, atol=2e-6, rtol=0)
