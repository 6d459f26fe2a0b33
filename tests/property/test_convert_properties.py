"""What a verdict lets through, the converter turns into the reader's own cache."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.convert import TORCH_DTYPES, Converter, Landed, RotationCache
from kvpact.contract.convert_blocks import as_octets, layer_bytes
from kvpact.contract.plan import TURN_BOUND_EPSILONS
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.contract.tables import table_gap
from kvpact.types import ByteOrder, Exactness, LaneOrder, Packing, VerdictWord
from tests.factories import make_contract, make_rotary, with_layout
from tests.reference_cache import in_lane_order, pack_layer, pair_norms, random_THD, stored_keys
from tests.strategies import cache_forms

torch.set_num_threads(1)
REACH = 1050
few = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@few
@given(
    writes=cache_forms(),
    reads=cache_forms(),
    one_table=st.booleans(),
    close=st.booleans(),
    packings=st.tuples(st.sampled_from(Packing), st.sampled_from(Packing)),
    byte_orders=st.tuples(st.sampled_from(ByteOrder), st.sampled_from(ByteOrder)),
    rotary_dim=st.sampled_from((4, 16)),
    amplitude=st.sampled_from((1.0, 1.2079441)),
    tokens=st.integers(1, 50),
    first_position=st.sampled_from((0, 1, 1000)),
    seed=st.integers(0, 99),
)
def test_whatever_is_not_refused_becomes_the_readers_own_cache(
    writes: dict[str, Any],
    reads: dict[str, Any],
    one_table: bool,
    close: bool,
    packings: tuple[Packing, Packing],
    byte_orders: tuple[ByteOrder, ByteOrder],
    rotary_dim: int,
    amplitude: float,
    tokens: int,
    first_position: int,
    seed: int,
) -> None:
    if one_table:
        writes["theta"], reads["theta"] = 1e4, 1.0001e4 if close else 1e4
    writer, reader = (
        with_layout(
            make_contract(rotary_dim=rotary_dim, amplitude=amplitude, **form),
            packing=packing,
            byte_order=order,
        )
        for form, packing, order in zip((writes, reads), packings, byte_orders, strict=True)
    )
    verdict = compare(writer, reader, Policy(lossy="allow"), REACH)
    if verdict.word is VerdictWord.REJECT:
        assert not one_table
        return
    positions = list(range(first_position, first_position + tokens))
    raw_THD, v_THD = random_THD(tokens=tokens, seed=seed), random_THD(tokens=tokens, seed=seed + 100)
    stored, own = (
        stored_keys(in_lane_order(raw_THD, side.group_of(1).rotary), side, positions)
        for side in (writer, reader)
    )
    landed = Converter(writer, reader).land(
        1,
        *pack_layer(stored, v_THD.to(stored.dtype), writer.layout),
        writer_block_start=0,
        writer_block_count=-(-tokens // writer.layout.block_size),
        positions_T=torch.tensor(positions),
        rotations=RotationCache(),
    )
    assert layer_bytes(landed.keys, landed.values, reader.layout)[0] == _zero_tailed(landed, reader)
    if stored.dtype == own.dtype:
        assert torch.equal(as_octets(landed.values), as_octets(v_THD.to(own.dtype)))
    if verdict.exactness is Exactness.BIT_EXACT and stored.dtype == own.dtype:
        assert torch.equal(as_octets(landed.keys), as_octets(own))
    else:
        assert _excess(landed.keys, own, writer, reader) <= (landed.max_abs_error or 0.0)
    assert (landed.max_abs_error is not None) == (verdict.exactness is Exactness.LOSSY)


def _zero_tailed(landed: Landed, reader: Contract) -> bytes:
    """The reader's blocks by the other way of writing them, its tail zeroed."""
    size = reader.layout.block_size
    padding = -len(landed.keys) % size
    keys, values = (
        torch.cat((as_octets(x), torch.zeros((padding, *as_octets(x).shape[1:]), dtype=torch.uint8))).view(
            x.dtype
        )
        for x in (landed.keys, landed.values)
    )
    return pack_layer(keys, values, reader.layout)[0]


def _excess(found: torch.Tensor, expected: torch.Tensor, writer: Contract, reader: Contract) -> float:
    """Largest error beyond the plan's bound and, where tables are only close, the phase that is stated."""
    dtypes = writer.layout.key_dtype, reader.layout.key_dtype
    narrowest = max((torch.finfo(TORCH_DTYPES[dtype]) for dtype in dtypes), key=lambda info: info.eps)
    epsilons = max(TURN_BOUND_EPSILONS.get(dtype, 2.0) for dtype in dtypes)
    tables = [side.group_of(1).rotary.tables[0] for side in (writer, reader)]
    phase_rad = table_gap(*tables, reach=REACH).largest_phase_rad
    norms = pair_norms(expected, reader.group_of(1).rotary).clamp(min=narrowest.smallest_normal)
    errors = (found.double() - expected.double()).abs()
    return float((errors - norms * (epsilons * narrowest.eps + phase_rad)).max())


@few
@given(
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    lane_order=st.sampled_from(LaneOrder),
    amplitude=st.floats(0.5, 2.0),
    position=st.integers(0, 131071),
    seed=st.integers(0, 9999),
)
def test_there_and_back_again_stays_within_the_bound(
    dtype: torch.dtype, lane_order: LaneOrder, amplitude: float, position: int, seed: int
) -> None:
    rotary = make_rotary(stored_lane_order=lane_order, amplitude=amplitude)
    rotation = rotation_at(rotary, rotary.tables[0], torch.tensor([position] * 8))
    raw_THD = random_THD(tokens=8, seed=seed).to(dtype)
    back_THD = unrotate(rotate(raw_THD, rotation), rotation)
    error = (back_THD.double() - raw_THD.double()).abs() / pair_norms(raw_THD, rotary)
    bounds = {torch.float32: 6.0, torch.float16: 2.0, torch.bfloat16: 2.0}
    assert float(error.max()) <= bounds[dtype] * torch.finfo(dtype).eps
