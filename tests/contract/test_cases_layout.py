"""Same byte counts, other meaning: axis orders and block sizes that a size check can't see."""

from __future__ import annotations

import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.types import AxisOrder, Exactness, PlanOp, VerdictWord
from tests.factories import make_contract
from tests.reference_cache import attend, pack, random_THD, stored_keys

torch.set_num_threads(1)
AXES = [(AxisOrder.NHD, AxisOrder.HND), (AxisOrder.HND, AxisOrder.NHD)]
BLOCKS = [(16, 32), (32, 16), (16, 24), (24, 16)]


def land(writer: Contract, reader: Contract, k_THD: torch.Tensor, v_THD: torch.Tensor) -> list[torch.Tensor]:
    """The writer's blocks one after the other, as chunks arrive."""
    converter, rotations, size = Converter(writer, reader), RotationCache(), writer.layout.block_size
    keys, values = pack(k_THD, writer.layout), pack(v_THD, writer.layout)
    blocks = -(-len(k_THD) // size)
    step = len(keys) // blocks
    landed = []
    for block in range(blocks):
        start, end = block * size, min((block + 1) * size, len(k_THD))
        part = slice(block * step, (block + 1) * step)
        landed.append(
            converter.convert(
                0,
                memoryview(keys)[part],
                memoryview(values)[part],
                writer_block_start=block,
                writer_block_count=1,
                positions_T=torch.arange(start, end),
                rotations=rotations,
            )
        )
    return [torch.cat(parts) for parts in zip(*landed, strict=True)]


@pytest.mark.parametrize(("writes", "reads"), AXES)
def test_axis_orders_are_told_apart_where_every_shape_is_equal(writes: AxisOrder, reads: AxisOrder) -> None:
    writer, reader = (make_contract(kv_heads=16, axis_order=order) for order in (writes, reads))
    k_THD, v_THD = (random_THD(tokens=40, heads=16, seed=seed) for seed in (0, 1))
    assert len(pack(k_THD, writer.layout)) == len(pack(k_THD, reader.layout))
    verdict = compare(writer, reader, Policy(), 4096)
    assert verdict.word is VerdictWord.CONVERT
    assert [difference.field for difference in verdict.differences] == ["axis_order"]
    assert [(step.op, step.exactness) for step in verdict.plan] == [(PlanOp.RELAYOUT, Exactness.BIT_EXACT)]
    stored = stored_keys(k_THD, writer, list(range(40)))
    k_landed, v_landed = land(writer, reader, stored, v_THD)
    assert torch.equal(k_landed, stored)
    assert torch.equal(v_landed, v_THD)


@pytest.mark.parametrize(("writes", "reads"), AXES)
def test_reading_without_the_relayout_is_wrong(writes: AxisOrder, reads: AxisOrder) -> None:
    writer, reader = (make_contract(kv_heads=16, axis_order=order) for order in (writes, reads))
    k_THD, v_THD = (random_THD(tokens=32, heads=16, seed=seed) for seed in (0, 1))
    q_HD = random_THD(tokens=1, heads=16, seed=2)[0]
    misread = Converter(reader, reader).convert(
        0,
        pack(k_THD, writer.layout),
        pack(v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=2,
        positions_T=torch.arange(32),
        rotations=RotationCache(),
    )
    right = attend(q_HD, k_THD, v_THD, 0.25)
    assert (attend(q_HD, *misread, 0.25) - right).abs().max() > 0.1


@pytest.mark.parametrize(("writes", "reads"), BLOCKS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 47])
def test_any_block_size_lands_as_any_other(writes: int, reads: int, tokens: int) -> None:
    writer, reader = (make_contract(block_size=size) for size in (writes, reads))
    verdict = compare(writer, reader, Policy(), 4096)
    assert verdict.word is VerdictWord.CONVERT
    assert [difference.field for difference in verdict.differences] == ["block_size"]
    assert [(step.op, step.exactness) for step in verdict.plan] == [(PlanOp.REBLOCK, Exactness.BIT_EXACT)]
    stored = stored_keys(random_THD(tokens=tokens), writer, list(range(tokens)))
    v_THD = random_THD(tokens=tokens, seed=1)
    k_landed, v_landed = land(writer, reader, stored, v_THD)
    assert pack(k_landed, reader.layout) == pack(stored, reader.layout)
    assert pack(v_landed, reader.layout) == pack(v_THD, reader.layout)
