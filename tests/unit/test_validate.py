"""Contracts that aren't whole are refused by the field at fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpact.contract.contract import Contract, FrequencyFormula, LatentDims, Quantization, RotaryTable, Schema
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest
from kvpact.types import (
    Dtype,
    FrequencyPolicy,
    KeyState,
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

WHOLE = make_contract()


def _with_table(**changes: Any) -> Contract:
    table = RotaryTable(inv_freq=make_inv_freq(), amplitude=1.0)
    return with_rotary(WHOLE, tables=(replace(table, **changes),))


def _with_shard(**changes: Any) -> Contract:
    return with_layout(WHOLE, shard=replace(WHOLE.layout.shard, **changes))


def test_whole_contracts_pass() -> None:
    validate_contract(WHOLE)
    validate_contract(make_contract(key_state=KeyState.NONE))
    validate_contract(make_contract(key_state=KeyState.RAW, rotary_dim=8, lane_offset=8))
    validate_contract(with_model(WHOLE, function_digest=None, lm_head_digest=None, tokenizer_digest=None))


@pytest.mark.parametrize(
    ("contract", "field"),
    [
        (replace(WHOLE, schema=Schema(major=0)), "schema_major"),
        (with_model(WHOLE, architecture=""), "architecture"),
        (with_model(WHOLE, function_digest=b"short"), "function_digest"),
        (with_model(WHOLE, compute_dtype=None), "compute_dtype"),
        (with_model(WHOLE, context_tokens=0), "context_tokens"),
        (replace(WHOLE, layer_groups=()), "layers"),
        (make_contract(layer_groups=(make_group(layers=(0, 2)),)), "layers"),
        (make_contract(layer_groups=(make_group(layers=(0,)), make_group(layers=(0, 1)))), "layers"),
        (with_group(WHOLE, kind=None), "kind"),
        (with_group(WHOLE, kind="full"), "kind"),
        (with_group(WHOLE, kind=LayerKind.SLIDING), "window"),
        (with_group(WHOLE, window=8), "window"),
        (with_group(WHOLE, kv_heads=0), "kv_heads"),
        (with_group(WHOLE, key_dim=True), "key_dim"),
        (with_group(WHOLE, value_dim=None), "value_dim"),
        (with_group(WHOLE, softmax_scale=0.0), "softmax_scale"),
        (with_group(WHOLE, softmax_scale=float("nan")), "softmax_scale"),
        (with_group(WHOLE, softcap=0.0), "softcap"),
        (with_group(WHOLE, sinks=None), "sinks"),
        (with_group(WHOLE, kind=LayerKind.MLA_LATENT), "latent"),
        (with_group(WHOLE, latent=LatentDims(latent_dim=4, rope_dim=2, content_first=True)), "latent"),
        (with_rotary(WHOLE, key_state=None), "key_state"),
        (with_rotary(WHOLE, key_state=KeyState.NONE), "rotary_dim"),
        (with_rotary(WHOLE, site="nobody"), "site"),
        (with_rotary(WHOLE, stored_lane_order=None), "stored_lane_order"),
        (with_rotary(WHOLE, frequency_policy=None), "frequency_policy"),
        (with_rotary(WHOLE, basis=None), "basis"),
        (with_rotary(WHOLE, rotary_dim=None), "rotary_dim"),
        (with_rotary(WHOLE, rotary_dim=15), "rotary_dim"),
        (with_rotary(WHOLE, lane_offset=2), "rotary_dim"),
        (with_rotary(WHOLE, lane_offset=None), "lane_offset"),
        (with_rotary(WHOLE, tables=()), "inv_freq"),
        (with_rotary(WHOLE, mrope_sections=(4, 2)), "mrope_sections"),
        (_with_table(inv_freq=make_inv_freq()[:-1]), "inv_freq"),
        (_with_table(inv_freq=(float("inf"), *make_inv_freq()[1:])), "inv_freq"),
        (_with_table(inv_freq=(0.1, *make_inv_freq()[1:])), "inv_freq"),
        (_with_table(amplitude=0.0), "amplitude"),
        (_with_table(amplitude=None), "amplitude"),
        (_with_table(upper_length=0), "upper_length"),
        (with_layout(WHOLE, axis_order=None), "axis_order"),
        (with_layout(WHOLE, block_size=0), "block_size"),
        (with_layout(WHOLE, packing=None), "packing"),
        (with_layout(WHOLE, key_dtype=None), "key_dtype"),
        (with_layout(WHOLE, value_dtype="float32 "), "value_dtype"),
        (with_layout(WHOLE, byte_order=None), "byte_order"),
        (with_layout(WHOLE, key_quantization=Quantization(fixed_scales=(1.0,))), "key_quantization"),
        (_with_shard(tensor_parallel_rank=1), "shard.tensor_parallel_rank"),
        (_with_shard(head_end=3), "shard.head_end"),
        (_with_shard(layer_start=2), "shard.layer_end"),
    ],
)
def test_a_field_that_is_unset_or_out_of_range_is_named(contract: Contract, field: str) -> None:
    with pytest.raises(BadRequest, match=f"contract field {field}: found") as refusal:
        validate_contract(contract)
    assert refusal.value.param == field


def test_tables_need_growing_bounds_and_one_end() -> None:
    table = RotaryTable(inv_freq=make_inv_freq(), amplitude=1.0)
    short = replace(table, upper_length=32)
    policy = FrequencyPolicy.BY_REQUEST_LENGTH
    validate_contract(with_rotary(WHOLE, tables=(short, table), frequency_policy=policy))
    for tables in ((table, short), (short, short), (short, replace(short, upper_length=8))):
        with pytest.raises(BadRequest, match="upper_length"):
            validate_contract(with_rotary(WHOLE, tables=tables, frequency_policy=policy))


def test_a_formula_stands_for_tables() -> None:
    formula = FrequencyFormula(name="dynamic_ntk", parameters=(2.0,))
    validate_contract(with_rotary(WHOLE, tables=(), formula=formula))
    with pytest.raises(BadRequest, match="formula"):
        validate_contract(with_rotary(WHOLE, tables=(), formula=replace(formula, parameters=(float("nan"),))))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    quantization = Quantization(
        scheme=QuantizationScheme.SYMMETRIC,
        granularity=QuantizationGranularity.TENSOR,
        scale_source=ScaleSource.FIXED,
        fixed_scales=(0.5, 0.25),
    )
    whole = with_layout(WHOLE, key_quantization=quantization, key_dtype=Dtype.INT8)
    validate_contract(whole)
    broken = replace(quantization, fixed_scales=(0.5, scale))
    with pytest.raises(BadRequest, match=r"key_quantization\.fixed_scales"):
        validate_contract(with_layout(whole, key_quantization=broken))
    with pytest.raises(BadRequest, match=r"key_quantization\.fixed_scales"):
        validate_contract(with_layout(whole, key_quantization=replace(quantization, fixed_scales=())))


FIXED_BY_HEAD = Quantization(
    scheme=QuantizationScheme.SYMMETRIC,
    granularity=QuantizationGranularity.HEAD,
    scale_source=ScaleSource.FIXED,
    fixed_scales=(0.5, 0.25, 0.125, 0.0625),
)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fixed_scales": (0.5, 0.25, 0.125)}, "fixed_scales"),
        ({"granularity": QuantizationGranularity.TENSOR}, "fixed_scales"),
        ({"granularity": QuantizationGranularity.TOKEN}, "scale_source"),
        ({"scale_source": ScaleSource.SHIPPED}, "fixed_scales"),
        ({"granularity": None}, "granularity"),
        ({"scale_source": None}, "scale_source"),
    ],
)
def test_scales_must_be_there_and_belong_there(changes: dict[str, Any], field: str) -> None:
    validate_contract(with_layout(WHOLE, value_quantization=FIXED_BY_HEAD, value_dtype=Dtype.INT8))
    broken = with_layout(WHOLE, value_quantization=replace(FIXED_BY_HEAD, **changes), value_dtype=Dtype.INT8)
    with pytest.raises(BadRequest, match=rf"value_quantization\.{field}"):
        validate_contract(broken)


@pytest.mark.parametrize("side", ["key", "value"])
def test_int8_without_scales_is_refused_and_never_read_as_scale_one(side: str) -> None:
    with pytest.raises(BadRequest, match=rf"{side}_quantization: found 'none'.*means nothing without scales"):
        validate_contract(with_layout(WHOLE, **{f"{side}_dtype": Dtype.INT8}))


@pytest.mark.parametrize(
    ("rank", "size", "heads", "field"),
    [
        (0, 2, (0, 1), None),
        (1, 2, (1, 2), None),
        (1, 4, (0, 1), None),
        (2, 4, (1, 2), None),
        (1, 4, (1, 2), "shard.head_start"),
        (0, 2, (0, 2), "shard.head_end"),
        (0, 3, (0, 1), "shard.tensor_parallel_size"),
    ],
)
def test_a_rank_holds_the_heads_that_its_split_gives_it(
    rank: int, size: int, heads: tuple[int, int], field: str | None
) -> None:
    contract = _with_shard(
        tensor_parallel_rank=rank, tensor_parallel_size=size, head_start=heads[0], head_end=heads[1]
    )
    if field is None:
        validate_contract(contract)
    else:
        with pytest.raises(BadRequest, match=field):
            validate_contract(contract)
