"""Verdicts over any pair of contracts: total, consistent, blind to grouping, and never strict for nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract, LayerGroup, Quantization
from kvpact.contract.explain import render_verdict
from kvpact.contract.findings import REMEDIES
from kvpact.contract.identity import contract_digest
from kvpact.contract.jsonform import contract_from_json, contract_to_json
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.tables import moves_within, table_gap
from kvpact.handoff.codec import contract_from_bytes, contract_to_bytes
from kvpact.types import DifferenceAction, Dtype, Exactness, KeyState, Relation, VerdictWord
from tests.factories import make_contract
from tests.strategies import contracts

torch.set_num_threads(1)
WORSE = (Exactness.BIT_EXACT, Exactness.ROUNDING, Exactness.LOSSY)
REACHES = st.sampled_from((0, 1, 2, 32, 33, 4096, 131072))
POLICIES = st.sampled_from(
    (Policy(), Policy(on_convertible="reject"), Policy(fields=(("key_state", "reject"),)))
)
few = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@few
@given(writer=contracts(), reader=contracts(), policy=POLICIES, reach=REACHES)
def test_any_pair_gets_a_consistent_verdict(
    writer: Contract, reader: Contract, policy: Policy, reach: int
) -> None:
    verdict = compare(writer, reader, policy, reach)
    actions = {difference.action for difference in verdict.differences}
    assert (verdict.word is VerdictWord.REJECT) == (DifferenceAction.REJECT in actions)
    assert (verdict.word is VerdictWord.ACCEPT) == (actions <= {DifferenceAction.ACCEPT})
    assert bool(verdict.plan) == (verdict.word is VerdictWord.CONVERT)
    names = [(difference.field, difference.relation) for difference in verdict.differences]
    assert len(names) == len(set(names))
    for difference in verdict.differences:
        assert difference.field in REMEDIES
        assert difference.remedy
        assert len(difference.writer) <= 256
        assert list(difference.layers) == sorted(set(difference.layers))
        assert difference.field in render_verdict(verdict)


@few
@given(contract=contracts(), reach=REACHES)
def test_a_contract_accepts_itself_unless_its_table_moves(contract: Contract, reach: int) -> None:
    verdict = compare(contract, contract, Policy(), reach)
    if any(moves_within(group.rotary, reach) for group in contract.layer_groups):
        assert {difference.field for difference in verdict.differences} == {"frequency_policy"}
    else:
        assert (verdict.word, verdict.differences) == (VerdictWord.ACCEPT, ())


@few
@given(writer=contracts(), reader=contracts(), reach=REACHES)
def test_both_directions_refuse_the_same_fields(writer: Contract, reader: Contract, reach: int) -> None:
    refused = [
        {(part.field, part.layers) for part in compare(*sides, Policy(), reach).differences}
        for sides in ((writer, reader), (reader, writer))
    ]
    assert refused[0] == refused[1]


@few
@given(writer=contracts(), reader=contracts(), reach=REACHES)
def test_the_grouping_of_layers_says_nothing(writer: Contract, reader: Contract, reach: int) -> None:
    verdict = compare(writer, reader, Policy(), reach)
    assert compare(writer, _one_layer_a_group(reader), Policy(), reach) == verdict
    assert compare(_one_layer_a_group(writer), reader, Policy(), reach) == verdict


def _one_layer_a_group(contract: Contract) -> Contract:
    groups = tuple(
        replace(group, layers=(layer,)) for group in reversed(contract.layer_groups) for layer in group.layers
    )
    return replace(contract, layer_groups=groups)


@few
@given(
    thetas=st.tuples(st.floats(1e2, 1e7), st.floats(1e2, 1e7)),
    amplitude=st.sampled_from((1.0, 1.2079441)),
    reach=st.integers(2, 131072),
)
def test_a_refused_table_moves_an_attention_logit_by_no_more_than_its_bound(
    thetas: tuple[float, float], amplitude: float, reach: int
) -> None:
    writer, reader = (make_contract(theta=theta, amplitude=amplitude) for theta in thetas)
    verdict = compare(writer, reader, Policy(), reach)
    assume(verdict.word is VerdictWord.REJECT)
    rotary, other = writer.group_of(0).rotary, reader.group_of(0).rotary
    gap = table_gap(rotary.tables[0], other.tables[0], reach=reach)
    position = min(gap.last_position, int(3.0 / gap.rad_per_position) or 1)
    k_THD = torch.zeros(1, 1, 16)
    k_THD[..., gap.lane] = 1.0
    written, own = (
        rotate(k_THD, rotation_at(part, part.tables[0], torch.tensor([position]))) for part in (rotary, other)
    )
    moved = float((written - own).norm())
    assert moved > 0.01, "a query along the difference sees this much"
    assert moved <= gap.logit_factor * (1 + 1e-4) + 0.02


@few
@given(offset=st.floats(-1e-3, 1e-3), lane=st.integers(0, 7), reach=st.integers(1, 131072))
def test_a_table_within_rounding_moves_no_key_by_more_than_it_states(
    offset: float, lane: int, reach: int
) -> None:
    writer = make_contract()
    table = writer.group_of(0).rotary.tables[0]
    moved = tuple(
        float(torch.tensor(number + offset * (i == lane), dtype=torch.float32))
        for i, number in enumerate(table.inv_freq)
    )
    verdict = compare(writer, make_contract(inv_freq=moved), Policy(), reach)
    largest_rad = max(abs(a - b) for a, b in zip(table.inv_freq, moved, strict=True)) * (reach - 1)
    assert (verdict.word is VerdictWord.ACCEPT) == (largest_rad <= 0.02)
    relations = {part.relation for part in verdict.differences}
    assert relations <= {Relation.ROUNDING, Relation.INCOMPATIBLE}


@few
@given(writer=contracts(), reader=contracts(), reach=REACHES)
def test_a_verdict_survives_protobuf_and_json_in_any_field_order(
    writer: Contract, reader: Contract, reach: int
) -> None:
    verdict = compare(writer, reader, Policy(), reach)
    for form in (_through_protobuf, _through_json):
        copied = form(writer), form(reader)
        assert [contract_digest(side) for side in copied] == [
            contract_digest(writer),
            contract_digest(reader),
        ]
        assert compare(*copied, Policy(), reach) == verdict


def _through_protobuf(contract: Contract) -> Contract:
    return contract_from_bytes(contract_to_bytes(contract), schema_major=contract.schema.major)


def _through_json(contract: Contract) -> Contract:
    return contract_from_json(_reversed(json.loads(json.dumps(contract_to_json(contract)))))


def _reversed(value: Any) -> Any:
    """The same JSON value with the fields of every object in the other order."""
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(list(value))}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


@few
@given(writer=contracts(), reader=contracts())
def test_an_angle_or_another_scale_on_quantised_data_is_lossy_and_the_worst_step_is_the_class(
    writer: Contract, reader: Contract
) -> None:
    reader = replace(reader, model=writer.model, layer_groups=_other_forms(writer, reader))
    reader = replace(reader, layout=replace(reader.layout, shard=writer.layout.shard))
    verdict = compare(writer, reader, Policy(lossy="allow"), 2)
    assume(verdict.word is not VerdictWord.REJECT)
    assert verdict.exactness is max(
        (step.exactness for step in verdict.plan), key=WORSE.index, default=WORSE[0]
    )
    ours, theirs = writer.layout, reader.layout
    keys = ours.key_dtype, ours.key_quantization, theirs.key_dtype, theirs.key_quantization
    values = ours.value_dtype, ours.value_quantization, theirs.value_dtype, theirs.value_quantization
    turned = any(part.field == "key_state" for part in verdict.differences)
    eight_bits = {Dtype.INT8, Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2} & {ours.key_dtype, theirs.key_dtype}
    scaled = any(part != Quantization() for part in (keys[1], keys[3]))
    if turned and (scaled or eight_bits):
        assert verdict.exactness is Exactness.LOSSY
    for dtype, scales, other_dtype, other_scales in (keys, values):
        if scales != other_scales or (scales != Quantization() and dtype is not other_dtype):
            assert verdict.exactness is Exactness.LOSSY
        if scales == other_scales == Quantization() and dtype is Dtype.FLOAT32 is not other_dtype:
            assert verdict.exactness is Exactness.LOSSY
    if verdict.exactness is Exactness.LOSSY:
        assert compare(writer, reader, Policy(), 2).word is VerdictWord.REJECT


def _other_forms(writer: Contract, reader: Contract) -> tuple[LayerGroup, ...]:
    """The writer's layers with the reader's lane order, and raw keys as rotated ones or the other way."""
    lanes = reader.layer_groups[0].rotary.stored_lane_order
    other = {KeyState.RAW: KeyState.ROTATED, KeyState.ROTATED: KeyState.RAW, KeyState.NONE: KeyState.NONE}
    turned = reader.layout.block_size % 2 == 0
    return tuple(
        replace(
            group,
            rotary=replace(
                group.rotary,
                stored_lane_order=lanes,
                key_state=other[group.rotary.key_state] if turned else group.rotary.key_state,
            ),
        )
        for group in writer.layer_groups
    )


@pytest.mark.parametrize("field", list(REMEDIES))
def test_every_field_has_a_remedy_that_names_something_to_do(field: str) -> None:
    assert len(REMEDIES[field]) > 10
