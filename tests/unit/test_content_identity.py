"""Names of cached blocks: alike where the numbers are, and never where anything that made them differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.content_identity import (
    ContentId,
    NameMaker,
    content_root,
    kept_offset,
    landed_passage,
    own_passage,
)
from kvpact.contract.contract import Contract, Quantization, RotaryTable
from kvpact.types import (
    AxisOrder,
    Dtype,
    Exactness,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
)
from tests.factories import (
    make_contract,
    make_group,
    make_inv_freq,
    with_group,
    with_layout,
    with_model,
    with_rotary,
)

TOKENS = tuple(range(100, 140))
SWITCH = 64
LENGTH = 48


def names(
    contract: Contract,
    *,
    tokens: tuple[int, ...] = TOKENS,
    start: int = 0,
    length: int = LENGTH,
    reader: Contract | None = None,
    exactness: Exactness = Exactness.BIT_EXACT,
) -> tuple[ContentId, ...]:
    """Names of two whole blocks of 16 tokens from position `start` on."""
    passage = own_passage(contract) if reader is None else landed_passage(contract, reader, exactness)
    return NameMaker(contract, passage, 16).names(tokens, range(start, start + len(tokens)), length)


def two_tables(contract: Contract) -> Contract:
    """Another table from a length of 65 on, picked by the request's length."""
    short, long = (
        RotaryTable(inv_freq=make_inv_freq(theta=theta), amplitude=amplitude, upper_length=upper)
        for theta, amplitude, upper in ((1e4, 1.0, SWITCH), (1e6, 1.2, None))
    )
    return with_rotary(contract, frequency_policy=FrequencyPolicy.BY_REQUEST_LENGTH, tables=(short, long))


def test_only_whole_blocks_have_names_and_each_has_its_own() -> None:
    found = names(make_contract())
    assert len(found) == 2
    assert len(set(found)) == 2
    assert {len(name) for name in found} == {32}
    assert names(make_contract(), tokens=TOKENS[:15]) == ()


def test_a_name_is_that_of_the_whole_prefix() -> None:
    other_start = (1, *TOKENS[1:])
    found, other = names(make_contract()), names(make_contract(), tokens=other_start)
    assert found[1] != other[1], "equal tokens behind another beginning"
    other_end = (*TOKENS[:31], 1)
    assert names(make_contract(), tokens=other_end)[0] == found[0]
    assert names(make_contract(), tokens=other_end)[1] != found[1]


def test_equal_tokens_at_other_positions_are_another_content() -> None:
    assert not set(names(make_contract())) & set(names(make_contract(), start=16))


def test_a_gap_in_the_positions_changes_every_name_behind_it() -> None:
    contract = make_contract()
    maker = NameMaker(contract, own_passage(contract), 16)
    dense = maker.names(TOKENS[:32], range(32), LENGTH)
    gapped = maker.names(TOKENS[:32], (*range(20), *range(28, 40)), LENGTH)
    assert gapped[0] == dense[0]
    assert gapped[1] != dense[1]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_contract(function_digest=b"g" * 32), id="function"),
        pytest.param(make_contract(theta=5e5), id="table"),
        pytest.param(make_contract(amplitude=1.1), id="amplitude"),
        pytest.param(make_contract(rotary_dim=8), id="rotary width"),
        pytest.param(make_contract(key_state=KeyState.NONE), id="unturned"),
        pytest.param(with_group(make_contract(), kind=LayerKind.SLIDING, window=32), id="window"),
        pytest.param(make_contract(softmax_scale=0.5), id="softmax scale"),
        pytest.param(with_group(make_contract(), softcap=30.0), id="softcap"),
        pytest.param(with_group(make_contract(), sinks=True), id="sinks"),
        pytest.param(make_contract(compute_dtype=Dtype.BFLOAT16), id="compute dtype"),
        pytest.param(make_contract(dtype=Dtype.BFLOAT16), id="stored dtype"),
    ],
)
def test_whatever_makes_other_numbers_makes_other_names(other: Contract) -> None:
    assert not set(names(make_contract())) & set(names(other))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_contract(key_state=KeyState.RAW), id="key state"),
        pytest.param(make_contract(stored_lane_order=LaneOrder.ADJACENT), id="lane order"),
        pytest.param(make_contract(axis_order=AxisOrder.HND), id="axis order"),
        pytest.param(make_contract(block_size=24), id="own block size"),
        pytest.param(make_contract(name="another name"), id="names for people"),
        pytest.param(make_contract(context_tokens=8192), id="served context"),
        pytest.param(with_model(make_contract(), lm_head_digest=b"x" * 32), id="output head"),
        pytest.param(
            make_contract(layer_groups=(make_group(layers=(0,)), make_group(layers=(1,)))), id="grouping"
        ),
    ],
)
def test_how_the_numbers_lie_is_not_in_a_name(other: Contract) -> None:
    assert names(make_contract()) == names(other)


def test_an_adapter_is_another_content_by_what_it_holds() -> None:
    contract = make_contract()
    roots = [
        content_root(contract, own_passage(contract), table_length=LENGTH, adapter=adapter)
        for adapter in (None, b"a" * 32, b"b" * 32, b"c" * 32)
    ]
    assert len(set(roots)) == 4


def test_both_sides_of_a_switch_are_two_contents_and_lengths_with_one_table_are_one() -> None:
    contract = two_tables(make_contract())
    assert names(contract, length=40) == names(contract, length=SWITCH)
    assert names(contract, length=SWITCH + 1) == names(contract, length=200)
    assert not set(names(contract, length=SWITCH)) & set(names(contract, length=SWITCH + 1))


def test_one_table_has_one_name_whatever_policy_picked_it() -> None:
    assert names(two_tables(make_contract()), length=40) == names(make_contract(), length=40)


def test_a_window_of_one_layer_alone_shows() -> None:
    groups = (make_group(layers=(0,)), make_group(layers=(1,), kind=LayerKind.SLIDING, window=32))
    swapped = (replace(groups[0], layers=(1,)), replace(groups[1], layers=(0,)))
    assert names(make_contract(layer_groups=groups)) != names(make_contract(layer_groups=swapped))


def test_what_a_conversion_did_to_the_numbers_is_in_the_name() -> None:
    contract = make_contract()
    exact = names(contract, reader=contract)
    assert exact == names(contract), "an exact landing is what the writer has itself"
    rounded = names(contract, reader=contract, exactness=Exactness.ROUNDING)
    lossy = names(contract, reader=contract, exactness=Exactness.LOSSY)
    narrowed = names(contract, reader=make_contract(dtype=Dtype.FLOAT16))
    assert len({exact[0], rounded[0], lossy[0], narrowed[0]}) == 4


def test_numbers_that_passed_a_narrower_form_and_came_back_are_another_content() -> None:
    wide, narrow = make_contract(), make_contract(dtype=Dtype.BFLOAT16)
    assert names(narrow, reader=wide) != names(wide, reader=wide)
    assert names(narrow, reader=wide) != names(narrow, reader=narrow)


def test_a_quantised_form_is_told_by_its_scales() -> None:
    def scaled(scale: float) -> Contract:
        quantization = Quantization(
            scheme=QuantizationScheme.SYMMETRIC,
            granularity=QuantizationGranularity.TENSOR,
            scale_source=ScaleSource.FIXED,
            fixed_scales=(scale, scale),
        )
        return with_layout(make_contract(dtype=Dtype.INT8), key_quantization=quantization)

    assert names(scaled(0.5)) == names(scaled(0.5))
    assert names(scaled(0.5)) != names(scaled(0.25))


def test_the_kept_row_is_picked_by_the_content_alone() -> None:
    found = names(make_contract())
    assert all(0 <= kept_offset(name, 16) < 16 for name in found)
    assert [kept_offset(name, 16) for name in found] == [name[0] % 16 for name in found]
