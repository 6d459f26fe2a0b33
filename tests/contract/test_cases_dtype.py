"""Number formats of one size, scales that are missing or swapped: bits are never read as what they aren't."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract, Quantization
from kvpact.contract.convert import Converter, Landed, RotationCache
from kvpact.contract.numbers import DTYPE_BYTES
from kvpact.errors import BadRequest, DataLoss
from kvpact.types import (
    Dtype,
    Exactness,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
    VerdictWord,
)
from tests.factories import make_contract, with_layout
from tests.reference_cache import pack, random_THD

torch.set_num_threads(1)
TOKENS = 20
GENEROUS = Policy(lossy="allow")
BY_TENSOR, BY_HEAD, BY_TOKEN = QuantizationGranularity


def scaled(granularity: QuantizationGranularity, *fixed: float) -> Quantization:
    """Symmetric; scales are shipped unless they are given."""
    return Quantization(
        scheme=QuantizationScheme.SYMMETRIC,
        granularity=granularity,
        scale_source=ScaleSource.FIXED if fixed else ScaleSource.SHIPPED,
        fixed_scales=fixed,
    )


def side(dtype: Dtype, heads: int = 2) -> Contract:
    """Keys and values in `dtype`; int8 with one shipped scale per head."""
    contract = make_contract(dtype=dtype, kv_heads=heads)
    if dtype is not Dtype.INT8:
        return contract
    return with_layout(contract, key_quantization=scaled(BY_HEAD), value_quantization=scaled(BY_HEAD))


def land(
    writer: Contract, reader: Contract, k_THD: torch.Tensor, v_THD: torch.Tensor, **scales: object
) -> Landed:
    """Layer 1, from stored numbers."""
    return Converter(writer, reader).land(
        1,
        pack(k_THD, writer.layout),
        pack(v_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=2,
        positions_T=torch.arange(TOKENS),
        rotations=RotationCache(),
        **scales,  # type: ignore[arg-type]
    )


def test_bfloat16_bits_read_as_float16_are_another_number() -> None:
    bits = torch.tensor([0.1621], dtype=torch.bfloat16)
    assert float(bits.view(torch.float16)) == pytest.approx(1.536, abs=2e-3)


@pytest.mark.parametrize("writes", Dtype)
@pytest.mark.parametrize("reads", Dtype)
def test_every_pair_of_dtypes_is_converted_to_the_same_numbers_or_refused(
    writes: Dtype, reads: Dtype
) -> None:
    writer, reader = side(writes), side(reads)
    strict, generous = (compare(writer, reader, policy, 64) for policy in (Policy(), GENEROUS))
    if writes is reads:
        assert strict.word is VerdictWord.ACCEPT
        return
    assert generous.word is VerdictWord.CONVERT
    assert (strict.word is VerdictWord.REJECT) == (generous.exactness is Exactness.LOSSY)
    if DTYPE_BYTES[writes] == DTYPE_BYTES[reads]:
        assert strict.word is VerdictWord.REJECT
        assert {part.field for part in strict.differences} >= {"key_dtype", "value_dtype"}
    real = [random_THD(tokens=TOKENS, seed=seed) for seed in (0, 1)]
    source = make_contract()
    written = land(source, writer, *real) if writes is not Dtype.FLOAT32 else land(source, source, *real)
    shipped = {
        f"{name}_scales": tuple(scales.flatten().tolist())
        for name, scales in (("key", written.key_scales), ("value", written.value_scales))
        if scales is not None
    }
    landed = land(writer, reader, written.keys, written.values, **shipped)
    meant, read = (real_THD(part.keys, part.key_scales) for part in (written, landed))
    error = float((read - meant).abs().max())
    value_error = float((_values_of(landed) - _values_of(written)).abs().max())
    if generous.exactness is Exactness.BIT_EXACT:
        assert (landed.max_abs_error, error) == (None, 0.0)
    else:
        assert landed.max_abs_error == pytest.approx(max(error, value_error), abs=1e-6)
    assert error <= {Dtype.FLOAT8_E5M2: 0.25, Dtype.FLOAT8_E4M3: 0.125}.get(reads, 0.02)


def _values_of(landed: Landed) -> torch.Tensor:
    return real_THD(landed.values, landed.value_scales)


def real_THD(x_THD: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What stored numbers mean, in float64."""
    return x_THD.to(torch.float32).double() * (1.0 if scales is None else scales.double())


def test_keys_and_values_may_have_dtypes_of_their_own() -> None:
    writer = with_layout(make_contract(), value_dtype=Dtype.BFLOAT16)
    k_THD, v_THD = random_THD(tokens=TOKENS), random_THD(tokens=TOKENS, seed=1).bfloat16()
    landed = land(writer, make_contract(), k_THD, v_THD)
    assert torch.equal(landed.keys, k_THD)
    assert torch.equal(landed.values, v_THD.float())
    fields = [part.field for part in compare(writer, make_contract(), Policy(), 64).differences]
    assert fields == ["value_dtype"]


@pytest.mark.parametrize(
    ("dtype", "number"), [(Dtype.FLOAT16, 1e6), (Dtype.BFLOAT16, 3.4e38), (Dtype.BFLOAT16, -3.4e38)]
)
def test_numbers_beyond_a_narrow_range_become_its_largest_and_the_error_says_so(
    dtype: Dtype, number: float
) -> None:
    k_THD = torch.full((TOKENS, 2, 16), number)
    landed = land(make_contract(), make_contract(dtype=dtype), k_THD, k_THD)
    largest = math.copysign(torch.finfo(landed.keys.dtype).max, number)
    assert torch.equal(landed.keys, torch.full_like(landed.keys, largest))
    assert landed.max_abs_error == pytest.approx(abs(number - largest), rel=1e-4)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("reads", [Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT8_E4M3, Dtype.INT8])
def test_a_number_that_is_none_is_refused_by_a_lossy_plan_and_hides_no_error(
    reads: Dtype, which: str, odd: float
) -> None:
    good, bad = random_THD(tokens=TOKENS), random_THD(tokens=TOKENS)
    bad[3, 1, 5] = odd
    rows = (bad, good) if which == "keys" else (good, bad)
    with pytest.raises(DataLoss, match=f"{which} of layer 1: 1 of {bad.numel()} numbers") as refusal:
        land(make_contract(), side(reads), *rows)
    assert refusal.value.check == "finite"


def test_a_number_that_is_none_stays_what_it_is_where_nothing_is_lost() -> None:
    odd = random_THD(tokens=TOKENS).bfloat16()
    odd[3, 1, 5], odd[3, 1, 6] = float("inf"), float("nan")
    landed = land(make_contract(dtype=Dtype.BFLOAT16), make_contract(), odd, odd)
    assert torch.equal(landed.keys.isinf(), odd.isinf())
    assert torch.equal(landed.values.isnan(), odd.isnan())


HEAD_SCALES = (0.25, 0.5, 1.0, 2.0)


def fp8_writer(granularity: QuantizationGranularity, dtype: Dtype = Dtype.FLOAT8_E4M3) -> Contract:
    """Four heads, scales shipped."""
    quantization = scaled(granularity)
    return with_layout(
        make_contract(dtype=dtype, kv_heads=4), key_quantization=quantization, value_quantization=quantization
    )


def stored_numbers() -> torch.Tensor:
    """Whole numbers, which every eight-bit format here holds."""
    return torch.arange(TOKENS * 64).remainder(15).sub(7.0).view(TOKENS, 4, 16)


@pytest.mark.parametrize("granularity", [BY_TENSOR, BY_HEAD, BY_TOKEN])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2, Dtype.INT8])
def test_scales_multiply_the_tensor_the_head_or_the_token_that_they_are_for(
    granularity: QuantizationGranularity, dtype: Dtype
) -> None:
    writer, reader = fp8_writer(granularity, dtype), make_contract(kv_heads=4)
    torch_dtype = {Dtype.INT8: torch.int8, Dtype.FLOAT8_E5M2: torch.float8_e5m2}.get(
        dtype, torch.float8_e4m3fn
    )
    whole = stored_numbers().clamp(-4, 4)
    by_token = torch.linspace(0.5, 2.0, TOKENS * 4).view(TOKENS, 4, 1)
    scales = {
        BY_TENSOR: torch.tensor([[[0.25]]]),
        BY_HEAD: torch.tensor(HEAD_SCALES).view(1, 4, 1),
        BY_TOKEN: by_token,
    }
    shipped = tuple(scales[granularity].flatten().tolist())
    doubled = tuple(2 * scale for scale in shipped)
    landed = land(
        writer, reader, whole.to(torch_dtype), whole.to(torch_dtype), key_scales=shipped, value_scales=doubled
    )
    assert torch.equal(landed.keys, whole * scales[granularity])
    assert torch.equal(landed.values, whole * scales[granularity] * 2)
    assert landed.max_abs_error == 0.0


@pytest.mark.parametrize("missing", ["key_scales", "value_scales"])
def test_a_missing_scale_is_refused_and_never_taken_as_one(missing: str) -> None:
    scales = {"key_scales": HEAD_SCALES, "value_scales": HEAD_SCALES}
    stored = stored_numbers().to(torch.float8_e4m3fn)
    for broken in (None, (), HEAD_SCALES[:3]):
        with pytest.raises(BadRequest, match=f"{missing} of layer 1") as refusal:
            land(
                fp8_writer(BY_HEAD), make_contract(kv_heads=4), stored, stored, **(scales | {missing: broken})
            )
        assert refusal.value.param == missing


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    stored = stored_numbers().to(torch.float8_e4m3fn)
    broken = (*HEAD_SCALES[:3], scale)
    with pytest.raises(BadRequest, match="numbers above 0"):
        land(
            fp8_writer(BY_HEAD),
            make_contract(kv_heads=4),
            stored,
            stored,
            key_scales=HEAD_SCALES,
            value_scales=broken,
        )


def test_scales_where_the_contract_ships_none_are_refused() -> None:
    x_THD = random_THD(tokens=TOKENS)
    with pytest.raises(BadRequest, match="ships none"):
        land(make_contract(), make_contract(), x_THD, x_THD, key_scales=(1.0,))


def test_swapped_scales_of_keys_and_values_are_caught() -> None:
    reader = with_layout(
        make_contract(dtype=Dtype.FLOAT8_E4M3),
        key_quantization=scaled(BY_TENSOR, 0.25, 0.25),
        value_quantization=scaled(BY_TENSOR, 0.5, 0.5),
    )
    ours = reader.layout
    swapped = with_layout(
        reader, key_quantization=ours.value_quantization, value_quantization=ours.key_quantization
    )
    assert compare(reader, reader, Policy(), 64).word is VerdictWord.ACCEPT
    verdict = compare(swapped, reader, Policy(), 64)
    assert verdict.word is VerdictWord.REJECT
    assert [part.field for part in verdict.differences] == ["key_quantization", "value_quantization"]
    stored = torch.ones(TOKENS, 2, 16).to(torch.float8_e4m3fn)
    right, wrong = (land(side, make_contract(), stored, stored) for side in (reader, swapped))
    assert (float(right.keys[0, 0, 0]), float(right.values[0, 0, 0])) == (0.25, 0.5)
    assert not torch.equal(right.keys, wrong.keys)


def test_one_scheme_on_both_sides_moves_numbers_and_scales_bit_by_bit() -> None:
    writer = fp8_writer(BY_TOKEN)
    reader = replace(writer, layout=replace(writer.layout, block_size=24))
    stored = stored_numbers().to(torch.float8_e4m3fn)
    shipped = tuple(float(n) for n in range(1, TOKENS * 4 + 1))
    assert compare(writer, reader, Policy(), 64).exactness is Exactness.BIT_EXACT
    landed = land(writer, reader, stored, stored, key_scales=shipped, value_scales=shipped)
    assert torch.equal(landed.keys.view(torch.uint8), stored.view(torch.uint8))
    assert landed.key_scales is not None
    assert tuple(landed.key_scales.flatten().tolist()) == shipped
    assert landed.max_abs_error is None


def test_a_fixed_scale_per_head_is_taken_from_its_layer() -> None:
    fixed = scaled(BY_HEAD, 1.0, 2.0, 4.0, 8.0)
    writer = with_layout(make_contract(dtype=Dtype.INT8), key_quantization=fixed, value_quantization=fixed)
    stored = torch.ones(TOKENS, 2, 16, dtype=torch.int8)
    landed = land(writer, make_contract(), stored, stored)
    assert landed.keys[0, :, 0].tolist() == [4.0, 8.0]
