"""Verdicts over any pair of contracts: total, consistent, blind to grouping, and never strict for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.explain import render_verdict
from kvpact.contract.findings import REMEDIES
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.tables import moves_within, table_gap
from kvpact.types import DifferenceAction, Relation, VerdictWord
from tests.factories import make_contract
from tests.strategies import contracts

torch.set_num_threads(1)
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


@pytest.mark.parametrize("field", list(REMEDIES))
def test_every_field_has_a_remedy_that_names_something_to_do(field: str) -> None:
    assert len(REMEDIES[field]) > 10
