"""What a verdict lets through, the converter turns into the reader's own cache."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.convert import TORCH_DTYPES, Converter, RotationCache
from kvpact.contract.plan import TURN_BOUND_EPSILONS
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.contract.tables import table_gap
from kvpact.types import Exactness, LaneOrder, VerdictWord
from tests.factories import make_contract, make_rotary
from tests.reference_cache import pack, pair_norms, random_THD, stored_keys
from tests.strategies import cache_forms

torch.set_num_threads(1)
REACH = 1050
few = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@few
@given(
    writes=cache_forms(),
    reads=cache_forms(),
    tables=st.sampled_from(("as drawn", "equal", "close")),
    rotary_dim=st.sampled_from((4, 16)),
    amplitude=st.sampled_from((1.0, 1.2079441)),
    tokens=st.integers(1, 50),
    first_position=st.sampled_from((0, 1, 1000)),
    seed=st.integers(0, 99),
)
def test_whatever_is_not_refused_becomes_the_readers_own_cache(
    writes: dict[str, Any],
    reads: dict[str, Any],
    tables: str,
    rotary_dim: int,
    amplitude: float,
    tokens: int,
    first_position: int,
    seed: int,
) -> None:
    if tables != "as drawn":
        reads |= {name: writes[name] for name in ("dtype", "theta", "stored_lane_order")}
    if tables == "close":
        writes["theta"], reads["theta"] = 1e4, 1.0001e4
    writer, reader = (
        make_contract(rotary_dim=rotary_dim, amplitude=amplitude, **form) for form in (writes, reads)
    )
    verdict = compare(writer, reader, Policy(), REACH)
    if verdict.word is VerdictWord.REJECT:
        assert tables == "as drawn"
        return
    positions = list(range(first_position, first_position + tokens))
    raw_THD = random_THD(tokens=tokens, seed=seed)
    stored, own = (stored_keys(raw_THD, side, positions) for side in (writer, reader))
    v_THD = random_THD(tokens=tokens, seed=seed + 100).to(stored.dtype)
    k_landed, v_landed = Converter(writer, reader).convert(
        1,
        pack(stored, writer.layout),
        pack(v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=-(-tokens // writer.layout.block_size),
        positions_T=torch.tensor(positions),
        rotations=RotationCache(),
    )
    assert torch.equal(v_landed, v_THD)
    assert pack(v_landed, reader.layout) == pack(v_THD, reader.layout)
    if verdict.exactness is Exactness.BIT_EXACT:
        assert torch.equal(k_landed, own)
    else:
        assert _relative_error(k_landed, own, reader) <= _allowance(writer, reader)


def _relative_error(found: torch.Tensor, expected: torch.Tensor, reader: Contract) -> float:
    norms = pair_norms(expected, reader.group_of(1).rotary)
    smallest = torch.finfo(expected.dtype).smallest_normal
    return float(((found.double() - expected.double()).abs() / norms.clamp(min=smallest)).max())


def _allowance(writer: Contract, reader: Contract) -> float:
    """The plan's bound, and the phase that the verdict stated where tables are only close."""
    dtype = reader.layout.key_dtype
    tables = [side.group_of(1).rotary.tables[0] for side in (writer, reader)]
    phase_rad = table_gap(*tables, reach=REACH).largest_phase_rad
    return TURN_BOUND_EPSILONS[dtype] * torch.finfo(TORCH_DTYPES[dtype]).eps + phase_rad


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
