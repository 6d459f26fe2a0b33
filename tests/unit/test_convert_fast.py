"""The fast way lands the same bits as the reference, straight into the reader's blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvpact.contract import convert_fast
from kvpact.contract.contract import Contract
from kvpact.contract.convert import TORCH_DTYPES, Converter, RotationCache
from kvpact.contract.convert_blocks import layer_bytes
from kvpact.contract.convert_fast import Destination, FastConverter, serves, warm_up
from kvpact.errors import DataLoss
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import AxisOrder, ByteOrder, Dtype, KeyState, LaneOrder, Packing
from tests.factories import make_contract, with_layout
from tests.reference_cache import random_THD

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOKENS, FIRST, POSITION = 47, 5, 1000
DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16)
FORMS = list(itertools.product(KeyState, LaneOrder, AxisOrder, DTYPES))
FORMS = [form for form in FORMS if form[0] is not KeyState.NONE]


def contract_of(
    form: tuple[KeyState, LaneOrder, AxisOrder, Dtype], block_size: int, **facts: object
) -> Contract:
    state, lanes, axes, dtype = form
    return make_contract(
        key_state=state,
        stored_lane_order=lanes,
        axis_order=axes,
        dtype=dtype,
        block_size=block_size,
        **facts,  # type: ignore[arg-type]
    )


def storage_after(writer: Contract, reader: Contract, *, fast: bool) -> list[torch.Tensor]:
    """The reader's whole cache after a landing into some of its blocks."""
    cache = PagedCache(reader, 12, CPU)
    converter, rotations = Converter(writer, reader), RotationCache()
    dtypes = TORCH_DTYPES[writer.layout.key_dtype], TORCH_DTYPES[writer.layout.value_dtype]
    widths = writer.group_of(1).key_dim, writer.group_of(1).value_dim
    stored = [
        random_THD(tokens=TOKENS, width=width, seed=width).to(dtype)
        for width, dtype in zip(widths, dtypes, strict=True)
    ]
    payloads = layer_bytes(*stored, writer.layout)
    size = reader.layout.block_size
    blocks = torch.tensor([7, 2, 9, 4, 1, 0, 3, 5, 6, 8, 10])[: -(-(FIRST + TOKENS) // size)]
    places = {
        "writer_block_start": 0,
        "writer_block_count": -(-TOKENS // writer.layout.block_size),
        "positions_T": torch.arange(POSITION, POSITION + TOKENS),
        "rotations": rotations,
    }
    if fast:
        keys, values = cache.storage(1)
        assert serves(converter, keys)
        numbers = blocks.numpy().astype(np.uint64)
        to = Destination(keys=keys, values=values, blocks=numbers, first_token=FIRST)
        FastConverter(converter).convert_into(1, *payloads, **places, destination=to)  # type: ignore[arg-type]
    else:
        cache.write(1, blocks, FIRST, *converter.convert(1, *payloads, **places))  # type: ignore[arg-type]
    return list(cache.storage(1))


def assert_same_bits(writer: Contract, reader: Contract) -> None:
    fast, reference = (storage_after(writer, reader, fast=fast) for fast in (True, False))
    for ours, theirs in zip(fast, reference, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert fast[0].abs().sum() > 0


@pytest.mark.parametrize("writes", FORMS)
@pytest.mark.parametrize("reads", FORMS)
def test_every_pair_of_forms_lands_bit_by_bit_as_by_the_reference(
    writes: tuple[KeyState, LaneOrder, AxisOrder, Dtype], reads: tuple[KeyState, LaneOrder, AxisOrder, Dtype]
) -> None:
    writer, reader = contract_of(writes, 16), contract_of(reads, 24)
    if (writes[3], reads[3]) == (Dtype.FLOAT32, Dtype.BFLOAT16):
        assert not serves(Converter(writer, reader), torch.zeros(1))
    else:
        assert_same_bits(writer, reader)


@pytest.mark.parametrize("writes", [LaneOrder.ADJACENT, LaneOrder.HALF_SPLIT])
@pytest.mark.parametrize("amplitude", [1.0, 1.2079441])
def test_partial_rotation_and_amplitude_land_bit_by_bit(writes: LaneOrder, amplitude: float) -> None:
    facts = {"rotary_dim": 4, "lane_offset": 8, "amplitude": amplitude, "value_dim": 12}
    raw = contract_of((KeyState.RAW, writes, AxisOrder.NHD, Dtype.FLOAT32), 16, **facts)
    rotated = contract_of((KeyState.ROTATED, LaneOrder.HALF_SPLIT, AxisOrder.HND, Dtype.FLOAT32), 32, **facts)
    assert_same_bits(raw, rotated)
    assert_same_bits(rotated, raw)


def test_packed_blocks_land_bit_by_bit() -> None:
    writer = with_layout(make_contract(key_state=KeyState.RAW, value_dim=12), packing=Packing.PACKED)
    assert_same_bits(writer, make_contract(value_dim=12, axis_order=AxisOrder.HND, block_size=24))


@pytest.mark.parametrize("block_size", [1, 7])
@pytest.mark.parametrize(("key_dtype", "value_dtype"), [DTYPES, DTYPES[::-1]])
@pytest.mark.parametrize("tokens", [1, 8])
def test_packed_blocks_of_odd_sizes_are_read_however_many_there_are(
    block_size: int, key_dtype: Dtype, value_dtype: Dtype, tokens: int
) -> None:
    """Two and four bytes a number: a block's end, or where its values begin, is no place for a float32."""
    sizes = {"key_dtype": key_dtype, "value_dtype": value_dtype}
    narrow = make_contract(kv_heads=1, value_dim=1, block_size=block_size)
    writer = with_layout(narrow, packing=Packing.PACKED, **sizes)
    k_THD = random_THD(tokens=tokens, heads=1).to(TORCH_DTYPES[key_dtype])
    v_THD = random_THD(tokens=tokens, heads=1, width=1).to(TORCH_DTYPES[value_dtype])
    landed = Converter(writer, with_layout(narrow, **sizes)).convert(
        0,
        *layer_bytes(k_THD, v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=-(-tokens // block_size),
        positions_T=torch.arange(tokens),
        rotations=RotationCache(),
    )
    assert torch.equal(landed[0], k_THD)
    assert torch.equal(landed[1], v_THD)


def test_turned_numbers_too_large_for_bfloat16_become_its_largest_in_both_ways() -> None:
    raw, rotated = (make_contract(dtype=Dtype.BFLOAT16, key_state=state) for state in list(KeyState)[:2])
    largest = torch.finfo(torch.bfloat16).max
    numbers = torch.full((16, 2, 16), largest).to(torch.bfloat16)
    numbers[8:] = -numbers[8:]
    for writer, reader in ((raw, rotated), (rotated, raw)):
        cache, converter = PagedCache(reader, 1, CPU), Converter(writer, reader)
        payload = layer_bytes(numbers, numbers, writer.layout)
        places = {"writer_block_start": 0, "writer_block_count": 1, "positions_T": torch.arange(16)}
        keys, values = cache.storage(0)
        to = Destination(keys=keys, values=values, blocks=np.zeros(1, np.uint64), first_token=0)
        own = RotationCache()
        FastConverter(converter).convert_into(0, *payload, **places, rotations=own, destination=to)  # type: ignore[arg-type]
        expected, _ = converter.convert(0, *payload, **places, rotations=own)  # type: ignore[arg-type]
        assert torch.equal(keys[0], expected)
        assert {largest, -largest} <= set(keys.flatten().tolist())


def test_infinite_and_undefined_numbers_stay_what_they_are() -> None:
    writer, reader = (make_contract(dtype=Dtype.BFLOAT16, key_state=state) for state in list(KeyState)[:2])
    odd = torch.full((16, 2, 16), float("nan")).to(torch.bfloat16)
    odd[0], odd[1] = float("inf"), 3.0
    cache = PagedCache(reader, 1, CPU)
    to = Destination(
        keys=cache.storage(0)[0], values=cache.storage(0)[1], blocks=np.zeros(1, np.uint64), first_token=0
    )
    FastConverter(Converter(writer, reader)).convert_into(
        0,
        *layer_bytes(odd, odd, writer.layout),
        writer_block_start=0,
        writer_block_count=1,
        positions_T=torch.arange(16),
        rotations=RotationCache(),
        destination=to,
    )
    assert torch.equal(to.values[0].isnan(), odd.isnan())
    assert torch.equal(to.values[0, 0], odd[0])
    assert to.keys[0, 2:].isnan().all()


def test_a_payload_of_another_size_is_refused() -> None:
    contract = make_contract()
    cache = PagedCache(contract, 2, CPU)
    keys, values = cache.storage(0)
    to = Destination(keys=keys, values=values, blocks=np.zeros(2, np.uint64), first_token=0)
    payload = bytes(16 * 2 * 16 * 4)
    for keys_sent, tokens in ((payload[:-4], 16), (payload, 17)):
        with pytest.raises(DataLoss, match=r"layer 0, blocks \[2, 3\)"):
            FastConverter(Converter(contract, contract)).convert_into(
                0,
                keys_sent,
                payload,
                writer_block_start=2,
                writer_block_count=1,
                positions_T=torch.arange(tokens),
                rotations=RotationCache(),
                destination=to,
            )


@pytest.mark.parametrize(
    "writer",
    [
        make_contract(dtype=Dtype.FLOAT16),
        with_layout(make_contract(), byte_order=ByteOrder.BIG),
        with_layout(make_contract(), key_dtype=Dtype.FLOAT8_E4M3),
    ],
)
def test_what_the_fast_way_does_not_serve_is_left_to_the_reference(writer: Contract) -> None:
    assert not serves(Converter(writer, make_contract()), torch.zeros(1))


def test_without_numba_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = Converter(make_contract(), make_contract())
    assert serves(converter, torch.zeros(1))
    monkeypatch.setattr(convert_fast, "compiler_installed", lambda: False)
    assert not serves(converter, torch.zeros(1))
    assert not warm_up()


def test_warming_up_compiles_every_pair_of_dtypes_that_a_landing_uses() -> None:
    from kvpact.contract.convert_kernel import land_rows

    assert warm_up()
    known = len(land_rows.signatures)
    storage_after(make_contract(key_state=KeyState.RAW), make_contract(), fast=True)
    assert len(land_rows.signatures) == known
