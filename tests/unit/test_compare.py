"""The verdict: every difference by its field's name, with what the policy makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.compare import CONVERTIBLE_FIELDS, Policy, compare, pairing_reach
from kvpact.contract.contract import (
    AttentionTemperature,
    Contract,
    LatentDims,
    Quantization,
    Schema,
)
from kvpact.contract.findings import REMEDIES
from kvpact.errors import BadRequest
from kvpact.types import (
    AxisOrder,
    Basis,
    ByteOrder,
    Difference,
    DifferenceAction,
    Dtype,
    Exactness,
    IdentityRelation,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    PlanOp,
    QuantizationGranularity,
    QuantizationScheme,
    Relation,
    RotationSite,
    ScaleSource,
    Verdict,
    VerdictWord,
)
from tests.factories import (
    make_contract,
    with_group,
    with_layout,
    with_model,
    with_rotary,
)

BASE = make_contract()
INT8_SCALES = Quantization(
    scheme=QuantizationScheme.SYMMETRIC,
    granularity=QuantizationGranularity.HEAD,
    scale_source=ScaleSource.SHIPPED,
)


def verdict_of(writer: Contract, reader: Contract, policy: Policy | None = None) -> Verdict:
    return compare(writer, reader, policy or Policy(), pairing_reach(writer, reader))


def only_difference(writer: Contract, reader: Contract) -> Difference:
    (difference,) = verdict_of(writer, reader).differences
    return difference


def test_a_contract_accepts_itself_bit_by_bit() -> None:
    verdict = verdict_of(BASE, make_contract())
    assert (verdict.word, verdict.identity) == (VerdictWord.ACCEPT, IdentityRelation.EQUAL)
    assert (verdict.differences, verdict.plan) == ((), ())
    assert verdict.exactness is Exactness.BIT_EXACT
    assert verdict.writer_digest == verdict.reader_digest


REFUSED = {
    "schema_major": replace(BASE, schema=Schema(major=2)),
    "required_features": replace(BASE, schema=Schema(required_features=("sinks_v2",))),
    "architecture": make_contract(architecture="qwen3"),
    "function_digest": make_contract(function_digest=b"x" * 32),
    "lm_head_digest": make_contract(lm_head_digest=b"x" * 32),
    "tokenizer_digest": make_contract(tokenizer_digest=b"x" * 32),
    "kind": with_group(BASE, kind=LayerKind.MLA_EXPANDED),
    "window": with_group(BASE, window=9),
    "kv_heads": with_group(BASE, kv_heads=1),
    "value_dim": with_group(BASE, value_dim=8),
    "key_dim": with_group(BASE, key_dim=32),
    "latent": with_group(BASE, latent=LatentDims(latent_dim=8, rope_dim=8, content_first=True)),
    "softmax_scale": with_group(BASE, softmax_scale=0.25 * 1.873854),
    "softcap": with_group(BASE, softcap=30.0),
    "sinks": with_group(BASE, sinks=True),
    "temperature": with_group(BASE, temperature=AttentionTemperature(formula="log1p", parameters=(0.1,))),
    "inv_freq": make_contract(theta=1e6),
    "amplitude": make_contract(amplitude=1.277259),
    "lane_offset": with_rotary(BASE, lane_offset=8),
    "mrope_sections": with_rotary(BASE, mrope_sections=(4, 2, 2)),
    "basis": with_rotary(BASE, basis=Basis.HADAMARD),
    "shard": with_layout(BASE, shard=replace(BASE.layout.shard, tensor_parallel_size=3, head_end=1)),
}
CONVERTED = {
    "key_state": (make_contract(key_state=KeyState.RAW), PlanOp.UNROTATE),
    "axis_order": (make_contract(axis_order=AxisOrder.HND), PlanOp.RELAYOUT),
    "block_size": (make_contract(block_size=24), PlanOp.REBLOCK),
    "stored_lane_order": (make_contract(stored_lane_order=LaneOrder.ADJACENT), PlanOp.REORDER_LANES),
    "packing": (with_layout(BASE, packing=Packing.PACKED), PlanOp.REPACK),
    "byte_order": (with_layout(BASE, byte_order=ByteOrder.BIG), PlanOp.SWAP_BYTES),
    "shard": (
        with_layout(BASE, shard=replace(BASE.layout.shard, tensor_parallel_size=2, head_end=1)),
        PlanOp.GATHER,
    ),
}
LOSSY = {
    "key_dtype": (with_layout(BASE, key_dtype=Dtype.BFLOAT16), PlanOp.CAST),
    "value_dtype": (with_layout(BASE, value_dtype=Dtype.FLOAT16), PlanOp.CAST),
    "key_quantization": (with_layout(BASE, key_quantization=INT8_SCALES), PlanOp.QUANTIZE),
    "value_quantization": (with_layout(BASE, value_quantization=INT8_SCALES), PlanOp.QUANTIZE),
}
NOTED = {
    "compute_dtype": make_contract(compute_dtype=Dtype.BFLOAT16),
    "context": make_contract(context_tokens=2048),
    "site": make_contract(site=RotationSite.KERNEL),
}


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_refused_field_is_the_only_difference_and_rejects(field: str, swapped: bool) -> None:
    sides = (REFUSED[field], BASE) if swapped else (BASE, REFUSED[field])
    verdict = verdict_of(*sides)
    (difference,) = verdict.differences
    assert (verdict.word, verdict.plan) == (VerdictWord.REJECT, ())
    assert (difference.field, difference.action) == (field, DifferenceAction.REJECT)
    assert difference.relation is Relation.INCOMPATIBLE
    assert difference.writer != difference.reader or field == "schema_major"
    assert difference.remedy == REMEDIES[field]


@pytest.mark.parametrize("field", CONVERTED)
def test_a_convertible_field_converts(field: str) -> None:
    reader, op = CONVERTED[field]
    verdict = verdict_of(BASE, reader)
    assert verdict.word is VerdictWord.CONVERT
    assert [(part.field, part.relation, part.action) for part in verdict.differences] == [
        (field, Relation.CONVERTIBLE, DifferenceAction.CONVERT)
    ]
    assert [step.op for step in verdict.plan] == [op]


@pytest.mark.parametrize("field", CONVERTED)
@pytest.mark.parametrize("by_field", [False, True])
def test_a_policy_turns_a_convertible_field_into_a_refusal_that_names_it(field: str, by_field: bool) -> None:
    policy = Policy(fields=((field, "reject"),)) if by_field else Policy(on_convertible="reject")
    verdict = verdict_of(BASE, CONVERTED[field][0], policy)
    assert (verdict.word, verdict.plan) == (VerdictWord.REJECT, ())
    assert verdict.differences[0].action is DifferenceAction.REJECT
    assert "handoff.on_convertible" in verdict.differences[0].remedy


def test_a_field_may_be_converted_where_the_deployment_rejects() -> None:
    policy = Policy(on_convertible="reject", fields=(("block_size", "convert"),))
    assert verdict_of(BASE, CONVERTED["block_size"][0], policy).word is VerdictWord.CONVERT
    assert verdict_of(BASE, CONVERTED["axis_order"][0], policy).word is VerdictWord.REJECT


def test_no_policy_lets_a_refused_field_pass() -> None:
    with pytest.raises(BadRequest, match="inv_freq"):
        Policy(fields=(("inv_freq", "convert"),))
    with pytest.raises(BadRequest, match="axis_order"):
        Policy(lossy_fields=(("axis_order", "allow"),))
    generous = Policy(lossy="allow", fields=tuple((field, "convert") for field in CONVERTIBLE_FIELDS))
    assert all(verdict_of(BASE, reader, generous).word is VerdictWord.REJECT for reader in REFUSED.values())


@pytest.mark.parametrize("field", LOSSY)
def test_a_lossy_field_is_refused_unless_the_policy_allows_loss(field: str) -> None:
    reader, op = LOSSY[field]
    refused = verdict_of(BASE, reader)
    (difference,) = refused.differences
    assert (refused.word, difference.action) == (VerdictWord.REJECT, DifferenceAction.REJECT)
    assert difference.relation is Relation.CONVERTIBLE
    assert difference.remedy.startswith("set handoff.lossy: allow on the decode side, or ")
    for policy in (Policy(lossy="allow"), Policy(lossy_fields=((field, "allow"),))):
        verdict = verdict_of(BASE, reader, policy)
        assert (verdict.word, verdict.exactness) == (VerdictWord.CONVERT, Exactness.LOSSY)
        assert [(step.op, step.exactness) for step in verdict.plan] == [(op, Exactness.LOSSY)]
    other = "value_dtype" if field != "value_dtype" else "key_dtype"
    assert verdict_of(BASE, reader, Policy(lossy_fields=((other, "allow"),))).word is VerdictWord.REJECT
    neither = verdict_of(BASE, reader, Policy(on_convertible="reject"))
    assert "handoff.on_convertible: convert and handoff.lossy: allow" in neither.differences[0].remedy


DTYPES = [dtype for dtype in Dtype if dtype is not Dtype.INT8]
WIDER = {
    Dtype.FLOAT16: {Dtype.FLOAT32},
    Dtype.BFLOAT16: {Dtype.FLOAT32},
    Dtype.FLOAT8_E4M3: {Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16},
    Dtype.FLOAT8_E5M2: {Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16},
}


@pytest.mark.parametrize("writes", DTYPES)
@pytest.mark.parametrize("reads", DTYPES)
def test_widening_is_exact_and_every_other_cast_is_lossy(writes: Dtype, reads: Dtype) -> None:
    verdict = verdict_of(make_contract(dtype=writes), make_contract(dtype=reads))
    if writes is reads:
        assert verdict.word is VerdictWord.ACCEPT
    elif reads in WIDER.get(writes, set()):
        assert (verdict.word, verdict.exactness) == (VerdictWord.CONVERT, Exactness.BIT_EXACT)
        assert [step.op for step in verdict.plan] == [PlanOp.CAST]
    else:
        assert verdict.word is VerdictWord.REJECT


@pytest.mark.parametrize("field", NOTED)
def test_a_noted_field_is_listed_and_accepted(field: str) -> None:
    verdict = verdict_of(BASE, NOTED[field])
    assert verdict.word is VerdictWord.ACCEPT
    assert [(part.field, part.relation, part.action) for part in verdict.differences] == [
        (field, Relation.NOTED, DifferenceAction.ACCEPT)
    ]


def test_another_compute_dtype_makes_the_class_rounding() -> None:
    assert verdict_of(BASE, NOTED["compute_dtype"]).exactness is Exactness.ROUNDING
    assert verdict_of(BASE, NOTED["context"]).exactness is Exactness.BIT_EXACT


def test_names_are_no_difference() -> None:
    assert verdict_of(BASE, with_model(BASE, name="other", revision="7", engine="x 1.0")).differences == ()


def test_every_difference_is_listed_at_once_in_a_fixed_order() -> None:
    reader = make_contract(
        theta=1e6, softmax_scale=0.5, block_size=24, dtype=Dtype.BFLOAT16, context_tokens=64
    )
    fields = [difference.field for difference in verdict_of(BASE, reader).differences]
    assert fields == ["softmax_scale", "inv_freq", "block_size", "key_dtype", "value_dtype", "context"]


def test_a_natural_site_goes_with_the_key_state_and_a_kernel_is_noted() -> None:
    raw_kernel = make_contract(key_state=KeyState.RAW, site=RotationSite.KERNEL)
    assert [part.field for part in verdict_of(BASE, raw_kernel).differences] == ["key_state", "site"]
    assert [part.field for part in verdict_of(BASE, CONVERTED["key_state"][0]).differences] == ["key_state"]


@pytest.mark.parametrize("field", ["function_digest", "lm_head_digest", "tokenizer_digest"])
def test_an_unknown_digest_is_not_compared_and_not_listed(field: str) -> None:
    verdict = verdict_of(with_model(BASE, **{field: None}), BASE)
    assert (verdict.identity, verdict.differences) == (IdentityRelation.NOT_COMPARED, ())


def test_a_known_digest_that_differs_counts_beside_an_unknown_one() -> None:
    writer = with_model(BASE, tokenizer_digest=None, function_digest=b"x" * 32)
    verdict = verdict_of(writer, BASE)
    assert verdict.identity is IdentityRelation.DIFFERENT
    assert [part.field for part in verdict.differences] == ["function_digest"]


@pytest.mark.parametrize(
    "obstacle",
    [
        lambda side: with_rotary(side, basis=Basis.HADAMARD),
        lambda side: with_rotary(side, mrope_sections=(4, 2, 2)),
    ],
)
def test_keys_that_no_turn_is_known_for_are_refused(obstacle: object) -> None:
    assert callable(obstacle)
    difference = only_difference(obstacle(BASE), obstacle(make_contract(key_state=KeyState.RAW)))
    assert (difference.field, difference.action) == ("key_state", DifferenceAction.REJECT)
    assert "can't be turned" in difference.explanation


@pytest.mark.parametrize(
    "changes", [{"key_dtype": Dtype.FLOAT8_E4M3}, {"key_dtype": Dtype.INT8, "key_quantization": INT8_SCALES}]
)
def test_turning_keys_of_eight_bits_is_lossy_even_under_one_scheme(changes: dict[str, object]) -> None:
    writer, reader = (
        with_layout(make_contract(key_state=state), **changes) for state in (KeyState.ROTATED, KeyState.RAW)
    )
    difference = only_difference(writer, reader)
    assert (difference.field, difference.action) == ("key_state", DifferenceAction.REJECT)
    verdict = verdict_of(writer, reader, Policy(lossy="allow"))
    assert (verdict.word, verdict.exactness) == (VerdictWord.CONVERT, Exactness.LOSSY)


def test_scales_move_along_with_their_tokens() -> None:
    writer, reader = (with_layout(BASE, key_quantization=INT8_SCALES, block_size=size) for size in (16, 24))
    assert verdict_of(writer, reader).exactness is Exactness.BIT_EXACT


def test_lanes_that_a_hadamard_basis_has_mixed_are_not_moved() -> None:
    mixed = with_rotary(BASE, basis=Basis.HADAMARD)
    difference = only_difference(mixed, with_rotary(mixed, stored_lane_order=LaneOrder.ADJACENT))
    assert (difference.field, difference.action) == ("stored_lane_order", DifferenceAction.REJECT)


def test_values_stay_short() -> None:
    names = tuple(f"feature_{i}" for i in range(100))
    difference = only_difference(BASE, replace(BASE, schema=Schema(required_features=names)))
    assert len(difference.reader) == 256


def test_the_shorter_context_is_the_reach_at_pairing() -> None:
    assert pairing_reach(BASE, NOTED["context"]) == pairing_reach(NOTED["context"], BASE) == 2048
