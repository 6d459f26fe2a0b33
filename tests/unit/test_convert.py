"""Conversion on landing: a writer's blocks become what the reader would have kept itself."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.plan import TURN_BOUND_EPSILONS
from kvpact.errors import DataLoss
from kvpact.types import AxisOrder, Dtype, FrequencyPolicy, KeyState
from tests.factories import make_contract, make_rotary, with_rotary
from tests.reference_cache import pack, pair_norms, random_THD, stored_keys

torch.set_num_threads(1)


def land(
    writer: Contract, reader: Contract, k_THD: torch.Tensor, v_THD: torch.Tensor, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's blocks, all at once."""
    return Converter(writer, reader).convert(
        0,
        pack(k_THD, writer.layout),
        pack(v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=-(-len(k_THD) // writer.layout.block_size),
        positions_T=torch.tensor(positions),
        rotations=RotationCache(),
    )


FORMS = list(itertools.product((KeyState.RAW, KeyState.ROTATED), AxisOrder, (16, 24)))


@pytest.mark.parametrize("writes", FORMS)
@pytest.mark.parametrize("reads", FORMS)
def test_every_pair_of_forms_lands_as_the_readers_own(
    writes: tuple[KeyState, AxisOrder, int], reads: tuple[KeyState, AxisOrder, int]
) -> None:
    writer, reader = (
        make_contract(key_state=state, axis_order=axes, block_size=size)
        for state, axes, size in (writes, reads)
    )
    positions = list(range(100, 147))
    raw_THD, v_THD = random_THD(tokens=47), random_THD(tokens=47, seed=1)
    k_landed, v_landed = land(writer, reader, stored_keys(raw_THD, writer, positions), v_THD, positions)
    assert torch.equal(v_landed, v_THD)
    own = stored_keys(raw_THD, reader, positions)
    if writes[0] is reads[0]:
        assert torch.equal(k_landed, own)
    else:
        norms = pair_norms(own, reader.group_of(0).rotary)
        error = ((k_landed.double() - own.double()).abs() / norms).max()
        assert error <= TURN_BOUND_EPSILONS[Dtype.FLOAT32] * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_narrow_numbers_keep_their_dtype_and_bound(dtype: Dtype) -> None:
    writer, reader = (
        make_contract(key_state=state, dtype=dtype) for state in (KeyState.ROTATED, KeyState.RAW)
    )
    positions = list(range(17))
    raw_THD = random_THD(tokens=17)
    v_THD = random_THD(tokens=17, seed=1).to(stored_keys(raw_THD, writer, positions).dtype)
    k_landed, v_landed = land(writer, reader, stored_keys(raw_THD, writer, positions), v_THD, positions)
    own = stored_keys(raw_THD, reader, positions)
    assert k_landed.dtype == own.dtype
    assert torch.equal(v_landed, v_THD)
    epsilon = torch.finfo(own.dtype).eps
    norms = pair_norms(own, reader.group_of(0).rotary)
    assert ((k_landed.double() - own.double()).abs() / norms).max() <= TURN_BOUND_EPSILONS[dtype] * epsilon


def test_a_read_only_payload_lands_without_a_warning_or_a_copy() -> None:
    contract = make_contract()
    k_THD = random_THD(tokens=16)
    payload = memoryview(pack(k_THD, contract.layout))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = Converter(contract, contract).convert(
            1,
            payload,
            payload,
            writer_block_start=0,
            writer_block_count=1,
            positions_T=torch.arange(16),
            rotations=RotationCache(),
        )
    assert converted[0].data_ptr() == converted[1].data_ptr()


def test_angles_are_computed_once_and_shared_by_layers() -> None:
    rotary, cache, positions_T = make_rotary(), RotationCache(), torch.arange(8)
    first = cache.rotation(rotary, 64, positions_T)
    assert cache.rotation(make_rotary(), 64, torch.arange(8)) is first
    assert cache.rotation(rotary, 64, positions_T + 1) is not first


def test_the_table_of_the_requests_length_is_used_where_there_are_two() -> None:
    short, long = make_rotary().tables[0], make_rotary(theta=1e6).tables[0]
    tables = (type(short)(inv_freq=short.inv_freq, amplitude=1.0, upper_length=32), long)
    policy = FrequencyPolicy.BY_REQUEST_LENGTH
    rotary = with_rotary(make_contract(), tables=tables, frequency_policy=policy).group_of(0).rotary
    positions_T = torch.arange(8)
    at_32, at_33 = (RotationCache(table_length=n).rotation(rotary, 64, positions_T) for n in (32, 33))
    assert torch.equal(at_32.cos, RotationCache().rotation(make_rotary(), 64, positions_T).cos)
    assert not torch.equal(at_32.cos, at_33.cos)


@pytest.mark.parametrize(("cut", "tokens"), [(1, 16), (4, 16), (0, 17)])
def test_a_payload_of_another_size_is_refused(cut: int, tokens: int) -> None:
    contract = make_contract()
    payload = pack(random_THD(tokens=16), contract.layout)
    with pytest.raises(DataLoss, match=r"layer 0, blocks \[2, 3\)"):
        Converter(contract, contract).convert(
            0,
            payload[: len(payload) - cut],
            payload,
            writer_block_start=2,
            writer_block_count=1,
            positions_T=torch.arange(tokens),
            rotations=RotationCache(),
        )


def broken_landings() -> dict[str, torch.Tensor]:
    """Landed keys under one mistake each; the reader keeps raw keys."""
    writer, reader = make_contract(), make_contract(key_state=KeyState.RAW)
    positions = list(range(1, 33))
    raw_THD = random_THD(tokens=32)
    stored = stored_keys(raw_THD, writer, positions)
    swapped = stored[..., torch.arange(16).view(2, 8).T.flatten()]
    v_THD = random_THD(tokens=32, seed=1)
    return {
        "right": land(writer, reader, stored, v_THD, positions)[0],
        "left rotated": land(writer, writer, stored, v_THD, positions)[0],
        "lanes swapped": land(writer, reader, swapped, v_THD, positions)[0],
        "off by one": land(writer, reader, stored, v_THD, [n + 1 for n in positions])[0],
        "keys for values": land(writer, reader, v_THD, stored, positions)[0],
    }


@pytest.mark.parametrize("mistake", ["left rotated", "lanes swapped", "off by one", "keys for values"])
def test_the_bound_catches_each_mistake(mistake: str) -> None:
    landed = broken_landings()
    own = random_THD(tokens=32)
    norms = pair_norms(own, make_contract().group_of(0).rotary)
    bound = TURN_BOUND_EPSILONS[Dtype.FLOAT32] * torch.finfo(torch.float32).eps
    assert ((landed["right"].double() - own.double()).abs() / norms).max() <= bound
    assert ((landed[mistake].double() - own.double()).abs() / norms).max() > 1000 * bound
