"""Shards of different sizes with few heads, and layers that are told apart by their index only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpact.contract.compare import Policy, compare, compare_joint
from kvpact.contract.contract import Contract, Quantization
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.convert_shards import ShardGatherer, ShardPayload
from kvpact.contract.shards import head_sources, split_heads
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest
from kvpact.types import (
    Dtype,
    Exactness,
    KeyState,
    PlanOp,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
    VerdictWord,
)
from tests.factories import make_contract, with_layout
from tests.reference_cache import pack, pair_norms, random_THD, stored_keys

torch.set_num_threads(1)
TOKENS, HEADS = 20, 2


def rank_of(contract: Contract, rank: int, size: int, layers: tuple[int, int] = (0, 2)) -> Contract:
    """One rank of a split over `size`."""
    held = split_heads(HEADS, rank, size) or range(1)
    shard = replace(
        contract.layout.shard,
        tensor_parallel_rank=rank,
        tensor_parallel_size=size,
        head_start=held.start,
        head_end=held.stop,
        layer_start=layers[0],
        layer_end=layers[1],
    )
    return replace(contract, layout=replace(contract.layout, shard=shard))


def split(contract: Contract, size: int) -> list[Contract]:
    return [rank_of(contract, rank, size) for rank in range(size)]


def payload_of(writer: Contract, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor) -> ShardPayload | None:
    """What one rank stores of whole keys and values."""
    shard = writer.layout.shard
    if not shard.layer_start <= layer < shard.layer_end:
        return None
    own = slice(shard.head_start, shard.head_end)
    return ShardPayload(keys=pack(k_THD[:, own], writer.layout), values=pack(v_THD[:, own], writer.layout))


@pytest.mark.parametrize(("writes", "reads"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("reader_state", [KeyState.ROTATED, KeyState.RAW])
def test_every_reader_rank_gets_its_own_heads(writes: int, reads: int, reader_state: KeyState) -> None:
    writers = split(make_contract(), writes)
    positions = list(range(TOKENS))
    raw_THD, v_THD = random_THD(tokens=TOKENS), random_THD(tokens=TOKENS, seed=1)
    stored = stored_keys(raw_THD, writers[0], positions)
    for reader in split(make_contract(key_state=reader_state, block_size=24), reads):
        validate_contract(reader)
        verdict = compare_joint(writers, reader, Policy(), 64)
        assert verdict.word is VerdictWord.CONVERT
        landed = ShardGatherer(writers, reader).gather(
            1,
            [payload_of(writer, 1, stored, v_THD) for writer in writers],
            positions_T=torch.arange(TOKENS),
            rotations=RotationCache(),
        )
        own = slice(reader.layout.shard.head_start, reader.layout.shard.head_end)
        assert torch.equal(landed.values, v_THD[:, own])
        expected = stored_keys(raw_THD, reader, positions)[:, own]
        norms = pair_norms(expected, reader.group_of(1).rotary)
        assert ((landed.keys.double() - expected.double()).abs() / norms).max() < 1e-6


def test_four_ranks_of_two_heads_hold_0_0_1_1_and_the_lowest_replica_gives_each() -> None:
    ranks = split(make_contract(), 4)
    held = [rank.layout.shard.head_start for rank in ranks]
    assert held == [0, 0, 1, 1]
    sources = head_sources(ranks[::-1], make_contract(), 0)
    assert [ranks[::-1][source.writer].layout.shard.tensor_parallel_rank for source in sources if source] == [
        0,
        2,
    ]


@pytest.mark.parametrize("wrong", [(0, 1, 0, 1), (0, 0, 0, 0)])
def test_replicas_mapped_another_way_are_refused(wrong: tuple[int, ...]) -> None:
    ranks = [
        replace(
            rank, layout=replace(rank.layout, shard=replace(rank.layout.shard, head_start=h, head_end=h + 1))
        )
        for rank, h in zip(split(make_contract(), 4), wrong, strict=True)
    ]
    right = (0, 0, 1, 1)
    for rank, found, expected in zip(ranks, wrong, right, strict=True):
        if found == expected:
            validate_contract(rank)
            continue
        with pytest.raises(BadRequest, match=r"shard\.head_(start|end)"):
            validate_contract(rank)


def test_three_ranks_of_two_heads_are_refused_by_name() -> None:
    reader = rank_of(make_contract(), 0, 3)
    verdict = compare(make_contract(), reader, Policy(), 64)
    (difference,) = verdict.differences
    assert (verdict.word, difference.field) == (VerdictWord.REJECT, "shard")
    assert "2 KV heads can't be split over 3 ranks" in difference.explanation
    with pytest.raises(BadRequest, match="can't be split over 3 ranks"):
        ShardGatherer([make_contract()], reader)


def test_a_split_with_a_missing_rank_is_refused_and_says_which_head() -> None:
    writers = split(make_contract(), 2)
    verdict = compare_joint(writers[:1], make_contract(), Policy(), 64)
    assert verdict.word is VerdictWord.REJECT
    assert "no writer holds head 1 of layers 0-1" in verdict.differences[0].explanation
    whole = compare_joint(writers, make_contract(), Policy(), 64)
    assert [(step.op, step.exactness) for step in whole.plan] == [(PlanOp.GATHER, Exactness.BIT_EXACT)]


def test_pipeline_stages_are_paired_by_layer_whatever_their_order() -> None:
    stages = [rank_of(make_contract(), 0, 1, layers) for layers in ((1, 2), (0, 1))]
    reader = make_contract()
    assert compare_joint(stages, reader, Policy(), 64).word is VerdictWord.CONVERT
    gatherer = ShardGatherer(stages, reader)
    for layer in (1, 0):
        k_THD, v_THD = random_THD(tokens=TOKENS, seed=layer), random_THD(tokens=TOKENS, seed=layer + 10)
        landed = gatherer.gather(
            layer,
            [payload_of(stage, layer, k_THD, v_THD) for stage in stages],
            positions_T=torch.arange(TOKENS),
            rotations=RotationCache(),
        )
        assert torch.equal(landed.keys, k_THD)
        assert torch.equal(landed.values, v_THD)
    with pytest.raises(BadRequest, match="nobody sent head 0 of layer 0"):
        gatherer.gather(0, [None, None], positions_T=torch.arange(TOKENS), rotations=RotationCache())


def test_a_side_with_one_more_layer_is_refused_by_its_index() -> None:
    for sides in ((2, 3), (3, 2)):
        writer, reader = (make_contract(layers=layers) for layers in sides)
        verdict = compare(writer, reader, Policy(), 64)
        (difference,) = (part for part in verdict.differences if part.field == "layers")
        assert (verdict.word, difference.layers) == (VerdictWord.REJECT, (2,))


def test_layers_of_other_widths_are_converted_by_index_not_by_order() -> None:
    base = make_contract().layer_groups[0]
    wide, narrow = replace(base, layers=(1,), value_dim=16), replace(base, layers=(0,), value_dim=8)
    writer = make_contract(layer_groups=(wide, narrow))
    reader = make_contract(layer_groups=(narrow, wide))
    assert compare(writer, reader, Policy(), 64).word is VerdictWord.ACCEPT
    converter = Converter(writer, reader)
    for layer, width in ((1, 16), (0, 8)):
        k_THD, v_THD = random_THD(tokens=16), random_THD(tokens=16, width=width)
        _, landed = converter.convert(
            layer,
            pack(k_THD, writer.layout),
            pack(v_THD, writer.layout),
            writer_block_start=0,
            writer_block_count=1,
            positions_T=torch.arange(16),
            rotations=RotationCache(),
        )
        assert torch.equal(landed, v_THD)


def gathered_scales(
    granularity: QuantizationGranularity, by_rank: list[tuple[float, ...]], tokens: int
) -> torch.Tensor:
    """Key scales of a whole reader from two ranks of one head each, int8, scales shipped."""
    quantization = Quantization(
        scheme=QuantizationScheme.SYMMETRIC, granularity=granularity, scale_source=ScaleSource.SHIPPED
    )
    reader = with_layout(
        make_contract(dtype=Dtype.INT8), key_quantization=quantization, value_quantization=quantization
    )
    stored = bytes(16 * 16)
    landed = ShardGatherer(split(reader, 2), reader).gather(
        0,
        [ShardPayload(keys=stored, values=stored, key_scales=own, value_scales=own) for own in by_rank],
        positions_T=torch.arange(tokens),
        rotations=RotationCache(),
    )
    assert landed.key_scales is not None
    assert landed.value_scales is not None
    assert torch.equal(landed.key_scales, landed.value_scales)
    return landed.key_scales


@pytest.mark.parametrize("granularity", [QuantizationGranularity.HEAD, QuantizationGranularity.TOKEN])
def test_one_scale_of_each_of_two_one_headed_ranks_stays_with_its_head(
    granularity: QuantizationGranularity,
) -> None:
    scales = gathered_scales(granularity, [(0.5,), (3.0,)], tokens=1)
    assert (tuple(scales.shape), scales.flatten().tolist()) == ((1, 2, 1), [0.5, 3.0])


def test_scales_of_a_whole_layer_are_gathered_where_all_ranks_say_the_same() -> None:
    assert gathered_scales(QuantizationGranularity.TENSOR, [(0.5,), (0.5,)], tokens=4).tolist() == [[[0.5]]]
    with pytest.raises(BadRequest, match=r"writers have 0\.5, 3\.0"):
        gathered_scales(QuantizationGranularity.TENSOR, [(0.5,), (3.0,)], tokens=4)
