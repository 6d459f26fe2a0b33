"""Rows against the reader's own table and against what landed, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvpact.contract.contract import Contract, RotaryTable
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.contract.witness import Rows, check_rows
from kvpact.errors import DataLoss
from kvpact.types import Dtype, KeyState, LaneOrder
from tests.factories import make_contract, with_layout, with_rotary

POSITIONS = torch.tensor([0, 1, 37, 4000])
LAYERS = (0, 0, 1, 1)


def table_of(contract: Contract) -> RotaryTable:
    return contract.layer_groups[0].rotary.tables[0]


def turned(contract: Contract, x_NHD: torch.Tensor, positions: torch.Tensor = POSITIONS) -> torch.Tensor:
    return rotate(x_NHD, rotation_at(contract.layer_groups[0].rotary, table_of(contract), positions))


def honest(writer: Contract, reader: Contract, positions: torch.Tensor = POSITIONS) -> Rows:
    """Rows of an honest writer, landed as the plan says, lanes in half-split order on both sides."""
    generator = torch.Generator().manual_seed(1)
    raw, value = (torch.randn(4, 2, 16, generator=generator) for _ in range(2))
    dtypes = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
    stored_raw = raw.to(dtypes[writer.layout.key_dtype]).float()
    if writer.layer_groups[0].rotary.key_state is KeyState.RAW:
        attended = turned(writer, stored_raw, positions)
        sent = stored_raw
    else:
        attended = sent = turned(writer, raw, positions).to(dtypes[writer.layout.key_dtype]).float()
    match writer.layer_groups[0].rotary.key_state, reader.layer_groups[0].rotary.key_state:
        case KeyState.RAW, KeyState.ROTATED:
            sent = turned(reader, sent, positions)
        case KeyState.ROTATED, KeyState.RAW:
            sent = unrotate(sent, rotation_at(writer.layer_groups[0].rotary, table_of(writer), positions))
    return Rows(
        layers=LAYERS,
        positions_N=positions,
        raw_key_NHD=raw,
        attended_key_NHD=attended,
        value_NHD=value,
        landed_key_NHD=sent.to(dtypes[reader.layout.key_dtype]).float(),
        landed_value_NHD=value.to(dtypes[writer.layout.key_dtype])
        .to(dtypes[reader.layout.key_dtype])
        .float(),
    )


def check(writer: Contract, reader: Contract, rows: Rows) -> float:
    return check_rows(writer, reader, rows, table_length=4096)


PAIRS = [
    (writer, reader, ours, theirs)
    for writer in (KeyState.RAW, KeyState.ROTATED)
    for reader in (KeyState.RAW, KeyState.ROTATED)
    for ours in (Dtype.FLOAT32, Dtype.BFLOAT16)
    for theirs in (Dtype.FLOAT32, Dtype.BFLOAT16)
]


@pytest.mark.parametrize(("ours", "theirs", "writer_dtype", "reader_dtype"), PAIRS)
def test_honest_rows_hold_in_every_pair_of_forms(
    ours: KeyState, theirs: KeyState, writer_dtype: Dtype, reader_dtype: Dtype
) -> None:
    writer = make_contract(key_state=ours, dtype=writer_dtype)
    reader = make_contract(key_state=theirs, dtype=reader_dtype)
    error = check(writer, reader, honest(writer, reader))
    exact = {writer_dtype, reader_dtype} == {Dtype.FLOAT32}
    assert error <= (3e-5 if exact else 0.05)


def doubled(rows: Rows, contract: Contract) -> Rows:
    return replace(rows, landed_key_NHD=turned(contract, rows.landed_key_NHD))


def one_further(rows: Rows, contract: Contract) -> Rows:
    shifted = turned(contract, rows.raw_key_NHD, POSITIONS + 1)
    return replace(rows, attended_key_NHD=shifted, landed_key_NHD=shifted)


def swapped(rows: Rows, contract: Contract) -> Rows:
    return replace(rows, landed_key_NHD=rows.landed_value_NHD, landed_value_NHD=rows.landed_key_NHD)


def one_value_bit(rows: Rows, contract: Contract) -> Rows:
    landed = rows.landed_value_NHD.clone()
    landed[2, 1, 3] = torch.nextafter(landed[2, 1, 3], torch.tensor(torch.inf))
    return replace(rows, landed_value_NHD=landed)


def not_a_number(rows: Rows, contract: Contract) -> Rows:
    return replace(rows, raw_key_NHD=rows.raw_key_NHD * torch.nan)


DAMAGE: dict[Callable[[Rows, Contract], Rows], str] = {
    doubled: r"layer \d, position [1-9]\d*: K as landed",
    one_further: r"layer \d, position \d+: K as attended isn't the raw key turned by this reader's table",
    swapped: r"layer \d, position \d+: K as landed isn't what the plan makes of the row",
    one_value_bit: "layer 1, position 37: V as landed isn't what the plan makes of the row",
    not_a_number: "off by inf",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_by_layer_position_and_side(damage: Callable[[Rows, Contract], Rows]) -> None:
    contract = make_contract()
    with pytest.raises(DataLoss, match=DAMAGE[damage]) as found:
        check(contract, contract, damage(honest(contract, contract), contract))
    assert found.value.check == "witness"


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_table_of_another_theta_doesnt_turn_the_raw_key(dtype: Dtype) -> None:
    writer, reader = make_contract(theta=5e5, dtype=dtype), make_contract(dtype=dtype)
    rows = honest(writer, reader)
    with pytest.raises(DataLoss, match="K as attended"):
        check(reader, reader, rows)


def test_a_table_that_was_accepted_as_rounding_may_be_off_by_its_phase_and_no_more() -> None:
    reader = make_contract()
    near = tuple(frequency * (1 + 1e-6) for frequency in table_of(reader).inv_freq)
    writer = make_contract(inv_freq=near)
    rows = honest(writer, reader)
    assert check(writer, reader, rows) < 1e-6
    with pytest.raises(DataLoss, match="K as attended"):
        check(reader, reader, rows)


@pytest.mark.parametrize("position", [1, 4000])
def test_tables_that_the_writer_itself_names_apart_are_no_rounding(position: int) -> None:
    reader = make_contract()
    writer = make_contract(theta=5e5)
    positions = torch.full((4,), position)
    with pytest.raises(
        DataLoss, match="layer 0: for 4096 tokens the writer names a table that is off"
    ) as found:
        check(writer, reader, honest(writer, reader, positions))
    assert found.value.check == "witness"


def test_the_phase_of_tables_that_differ_by_rounding_is_bounded_behind_the_length_too() -> None:
    reader = make_contract()
    near = tuple(frequency * (1 + 4e-6) for frequency in table_of(reader).inv_freq)
    writer = make_contract(inv_freq=near)
    check(writer, reader, honest(writer, reader))
    with pytest.raises(DataLoss, match="K as attended"):
        check(writer, reader, honest(writer, reader, torch.full((4,), 400_000)))


LIES_WITHIN_TWO_EPSILONS = {
    "amplitude": with_rotary(
        make_contract(dtype=Dtype.BFLOAT16), tables=(replace(table_of(make_contract()), amplitude=1.01),)
    ),
    "theta": make_contract(theta=1e4 * 1.0005, dtype=Dtype.BFLOAT16),
}


@pytest.mark.parametrize("state", [KeyState.RAW, KeyState.ROTATED])
@pytest.mark.parametrize("lie", LIES_WITHIN_TWO_EPSILONS)
def test_a_narrow_cache_hides_no_turn_that_is_off_by_more_than_its_one_rounding(
    lie: str, state: KeyState
) -> None:
    told = make_contract(dtype=Dtype.BFLOAT16, key_state=state)
    runs = with_rotary(LIES_WITHIN_TWO_EPSILONS[lie], key_state=state)
    positions = torch.tensor([300, 400, 500, 511])
    check(told, told, honest(told, told, positions))
    with pytest.raises(DataLoss, match="K as attended"):
        check(told, told, honest(runs, told, positions))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("compute", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_one_rounding_to_each_dtype_holds_whatever_the_numbers(
    stored: torch.dtype, compute: torch.dtype, scale: float
) -> None:
    named = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}
    contract = make_contract(dtype=named[stored])
    contract = replace(contract, model=replace(contract.model, compute_dtype=named[compute]))
    generator = torch.Generator().manual_seed(3)
    raw = (torch.randn(2000, 2, 16, generator=generator) * scale).to(compute).float()
    positions = torch.arange(2000)
    attended = turned(contract, raw, positions).to(compute).to(stored).to(compute).float()
    landed = turned(contract, raw, positions).to(compute).to(stored).float()
    rows = Rows(
        layers=(0,) * 2000,
        positions_N=positions,
        raw_key_NHD=raw,
        attended_key_NHD=attended,
        value_NHD=raw.to(stored).float(),
        landed_key_NHD=attended.to(stored).float(),
        landed_value_NHD=raw.to(stored).float(),
    )
    assert torch.equal(landed, attended.to(stored).float()) or stored is not compute
    check(contract, contract, rows)


def test_lanes_in_another_order_are_looked_at_in_the_readers() -> None:
    reader = make_contract()
    rows = honest(reader, reader)
    writer = with_rotary(make_contract(), stored_lane_order=LaneOrder.ADJACENT)

    def adjacent(x_NHD: torch.Tensor) -> torch.Tensor:
        return x_NHD.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    told = replace(
        rows, raw_key_NHD=adjacent(rows.raw_key_NHD), attended_key_NHD=adjacent(rows.attended_key_NHD)
    )
    assert check(writer, reader, told) < 1e-6
    with pytest.raises(DataLoss):
        check(writer, reader, rows)
    with pytest.raises(DataLoss):
        check(reader, reader, told)


def test_lanes_that_dont_rotate_are_compared_as_they_are() -> None:
    contract = make_contract(rotary_dim=8, lane_offset=4)
    rows = honest(contract, contract)
    check(contract, contract, rows)
    off = rows.attended_key_NHD.clone()
    off[0, 0, 0] += 1e-4
    with pytest.raises(DataLoss, match="position 0: K as attended"):
        check(contract, contract, replace(rows, attended_key_NHD=off))


def test_layers_without_rotation_attend_the_raw_key() -> None:
    contract = make_contract(key_state=KeyState.NONE, rotary_dim=0)
    rows = honest(make_contract(), make_contract())
    plain = replace(rows, attended_key_NHD=rows.raw_key_NHD, landed_key_NHD=rows.raw_key_NHD)
    assert check(contract, contract, plain) == 0.0
    with pytest.raises(DataLoss, match="K as attended"):
        check(contract, contract, rows)


def test_a_narrower_store_is_reproduced_bit_by_bit() -> None:
    writer = make_contract()
    reader = with_layout(make_contract(), key_dtype=Dtype.BFLOAT16, value_dtype=Dtype.BFLOAT16)
    rows = honest(writer, reader)
    assert 0 < check(writer, reader, rows) < 0.05
    off = rows.landed_key_NHD.clone()
    off[1, 0, 5] *= 1 + 2**-7
    with pytest.raises(DataLoss, match="layer 0, position 1: K as landed"):
        check(writer, reader, replace(rows, landed_key_NHD=off))
