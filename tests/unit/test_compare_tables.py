"""Tables judged by their numbers: equal bits, rounding within reach, or a refusal that explains itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvpact.contract.compare import Policy, compare
from kvpact.contract.compare_layers import LayerSide, compare_layer
from kvpact.contract.contract import Contract, FrequencyFormula, RotaryTable
from kvpact.contract.tables import chord, moves_within, table_at, table_gap
from kvpact.types import (
    DifferenceAction,
    Exactness,
    FrequencyPolicy,
    KeyState,
    Relation,
    Verdict,
    VerdictWord,
)
from tests.factories import make_contract, make_inv_freq, make_rotary, with_rotary

TABLE = make_inv_freq()


def verdict_of(writer: Contract, reader: Contract, reach: int = 4096) -> Verdict:
    return compare(writer, reader, Policy(), reach)


def nudged(lane: int, rad_per_position: float) -> tuple[float, ...]:
    """The default table with one lane moved."""
    return tuple(float(n) + rad_per_position * (i == lane) for i, n in enumerate(TABLE))


@pytest.mark.parametrize("writes", [KeyState.RAW, KeyState.ROTATED])
@pytest.mark.parametrize("reads", [KeyState.RAW, KeyState.ROTATED])
def test_another_theta_is_refused_for_raw_keys_too(writes: KeyState, reads: KeyState) -> None:
    verdict = verdict_of(make_contract(key_state=writes), make_contract(key_state=reads, theta=1e5))
    assert verdict.word is VerdictWord.REJECT
    refused = [part for part in verdict.differences if part.action is DifferenceAction.REJECT]
    assert [part.field for part in refused] == ["inv_freq"]
    assert "raw keys" in refused[0].explanation


def test_the_first_differing_number_and_the_count_are_shown() -> None:
    (difference,) = verdict_of(make_contract(), make_contract(theta=1e5)).differences
    assert (difference.writer, difference.reader) == (
        "[1] 0.316228 (7 of 8 differ)",
        "[1] 0.237137 (7 of 8 differ)",
    )
    assert difference.layers == (0, 1)


def test_numbers_that_look_alike_are_shown_with_more_digits() -> None:
    (difference,) = verdict_of(make_contract(), make_contract(inv_freq=nudged(0, 1e-7)), reach=16).differences
    assert difference.writer.split()[1] != difference.reader.split()[1]


@pytest.mark.parametrize(("phase_rad", "word"), [(0.0199, VerdictWord.ACCEPT), (0.0201, VerdictWord.REJECT)])
@pytest.mark.parametrize("reach", [2, 129, 4096])
def test_two_hundredths_of_a_radian_at_the_last_position_is_the_limit(
    phase_rad: float, word: VerdictWord, reach: int
) -> None:
    reader = make_contract(inv_freq=nudged(3, phase_rad / (reach - 1)))
    verdict = verdict_of(make_contract(), reader, reach)
    (difference,) = verdict.differences
    assert (verdict.word, difference.field) == (word, "inv_freq")
    if word is VerdictWord.ACCEPT:
        assert (difference.relation, difference.action) == (Relation.ROUNDING, DifferenceAction.ACCEPT)
        assert verdict.exactness is Exactness.ROUNDING
        assert f"{phase_rad:.4g} rad" in difference.explanation


@pytest.mark.parametrize("lane", [0, 3, 7])
def test_one_unit_in_the_last_place_is_rounding_and_its_phase_is_stated(lane: int) -> None:
    number = np.float32(TABLE[lane])
    next_number = float(np.nextafter(number, np.float32(np.inf)))
    moved = tuple(next_number if i == lane else n for i, n in enumerate(TABLE))
    verdict = verdict_of(make_contract(), make_contract(inv_freq=moved), reach=4096)
    (difference,) = verdict.differences
    assert (verdict.word, verdict.exactness) == (VerdictWord.ACCEPT, Exactness.ROUNDING)
    phase_rad = (next_number - float(number)) * 4095
    assert f"at most {phase_rad:.4g} rad within 4096 positions" in difference.explanation


@pytest.mark.parametrize("writes", [KeyState.RAW, KeyState.ROTATED])
def test_a_table_that_drifts_is_refused_at_the_largest_reachable_position_only(writes: KeyState) -> None:
    writer = make_contract(key_state=writes)
    reader = make_contract(inv_freq=nudged(2, 5e-6))
    assert verdict_of(writer, reader, reach=4000).word is not VerdictWord.REJECT
    refused = verdict_of(writer, reader, reach=4002)
    assert "inv_freq" in [part.field for part in refused.differences]
    assert refused.word is VerdictWord.REJECT


@pytest.mark.parametrize(("relative", "fields"), [(9e-7, []), (1.1e-6, ["amplitude"])])
def test_amplitudes_are_one_within_a_millionth(relative: float, fields: list[str]) -> None:
    verdict = verdict_of(
        make_contract(amplitude=1.2079441), make_contract(amplitude=1.2079441 * (1 + relative))
    )
    assert [part.field for part in verdict.differences] == fields


def test_raw_keys_with_another_amplitude_are_refused() -> None:
    writer, reader = (make_contract(key_state=KeyState.RAW, amplitude=a) for a in (1.0, 1.277259))
    assert [part.field for part in verdict_of(writer, reader).differences] == ["amplitude"]


@pytest.mark.parametrize("amplitudes", [(1.0, 1.0), (1.2, 1.0), (0.7, 1.9)])
@pytest.mark.parametrize("lane_gap", [1e-5, 0.003, 0.4, 2.0])
def test_the_bound_is_the_maximum_over_all_positions(
    amplitudes: tuple[float, float], lane_gap: float
) -> None:
    phases = np.linspace(0.0, 50 * lane_gap, 20001)
    brute = np.abs(amplitudes[0] - amplitudes[1] * np.exp(1j * phases)).max()
    assert chord(50 * lane_gap, *amplitudes) == pytest.approx(brute, rel=1e-4)


def test_the_bound_is_two_from_half_a_turn_on() -> None:
    assert chord(math.pi) == chord(1e9) == 2.0
    assert chord(math.pi / 4) == pytest.approx(2 * math.sin(math.pi / 8))
    assert chord(0.0) == 0.0


def test_the_bound_covers_the_logit_of_the_two_dimensional_example() -> None:
    gap = table_gap(
        RotaryTable(inv_freq=(math.pi / 2,), amplitude=1.0),
        RotaryTable(inv_freq=(math.pi / 4,), amplitude=1.0),
        reach=2,
    )
    assert gap.logit_factor / math.sqrt(2) >= 1 / math.sqrt(2) - 0.5


@pytest.mark.parametrize("per_position", [0.0, 1e-320, math.nan, math.inf])
def test_odd_gaps_have_no_first_position_past_one_radian(per_position: float) -> None:
    still, moved = (RotaryTable(inv_freq=(number,), amplitude=1.0) for number in (0.0, per_position))
    assert table_gap(still, moved, reach=100).first_position_past_one_rad is None


@pytest.mark.parametrize("numbers", [(), (math.nan,) * 8, (math.inf,) * 8, (0.0,) * 3])
def test_absurd_numbers_are_refused_without_a_crash(numbers: tuple[float, ...]) -> None:
    absurd = with_rotary(make_contract(), tables=(RotaryTable(inv_freq=numbers, amplitude=math.nan),))
    sides = [
        LayerSide(group=contract.group_of(0), layout=contract.layout, context_tokens=4096)
        for contract in (make_contract(), absurd)
    ]
    for writer, reader in (sides, sides[::-1]):
        findings = compare_layer(writer, reader, reach=4096)
        assert [(part.field, part.relation) for part in findings] == [
            ("inv_freq", Relation.INCOMPATIBLE),
            ("amplitude", Relation.INCOMPATIBLE),
        ]


def test_a_side_without_tables_is_refused_without_a_crash() -> None:
    bare = with_rotary(make_contract(), tables=())
    assert verdict_of(bare, make_contract()).word is VerdictWord.REJECT
    assert verdict_of(make_contract(key_state=KeyState.RAW), bare).word is VerdictWord.REJECT


@pytest.mark.parametrize("reach", [-1, 0, 1])
def test_a_reach_without_a_second_position_shows_no_phase(reach: int) -> None:
    assert verdict_of(make_contract(), make_contract(theta=1e6), reach).word is VerdictWord.ACCEPT


def two_tables(policy: FrequencyPolicy, context_tokens: int = 4096, long_theta: float = 1e6) -> Contract:
    """Short up to 32 tokens, that length included; long beyond."""
    short = RotaryTable(inv_freq=TABLE, amplitude=1.0, upper_length=32)
    long = make_rotary(theta=long_theta).tables[0]
    base = make_contract(context_tokens=context_tokens)
    return with_rotary(base, tables=(short, long), frequency_policy=policy)


@pytest.mark.parametrize(("length", "short"), [(31, True), (32, True), (33, False)])
def test_a_length_of_exactly_the_limit_is_short(length: int, short: bool) -> None:
    rotary = two_tables(FrequencyPolicy.BY_REQUEST_LENGTH).group_of(0).rotary
    table = table_at(rotary, length=length, context_tokens=4096)
    assert table is rotary.tables[0 if short else 1]


def test_request_lengths_are_judged_at_the_reach() -> None:
    policy = FrequencyPolicy.BY_REQUEST_LENGTH
    writer, reader = two_tables(policy), two_tables(policy, long_theta=1e5)
    assert verdict_of(writer, reader, reach=32).differences == ()
    assert [part.field for part in verdict_of(writer, reader, reach=33).differences] == ["inv_freq"]


def test_served_lengths_pick_one_table_each() -> None:
    policy = FrequencyPolicy.BY_SERVED_LENGTH
    verdict = verdict_of(two_tables(policy, 32), two_tables(policy, 128), reach=16)
    refused = [part.field for part in verdict.differences if part.action is DifferenceAction.REJECT]
    assert refused == ["inv_freq"]


def test_other_policies_with_the_same_numbers_are_accepted_and_stated() -> None:
    writer, reader = two_tables(FrequencyPolicy.BY_REQUEST_LENGTH), make_contract()
    (difference,) = verdict_of(writer, reader, reach=32).differences
    assert (difference.field, difference.relation) == ("frequency_policy", Relation.NOTED)


@pytest.mark.parametrize(("reach", "word"), [(32, VerdictWord.ACCEPT), (33, VerdictWord.REJECT)])
def test_a_side_that_moves_with_the_current_length_is_refused_past_its_switch(
    reach: int, word: VerdictWord
) -> None:
    moving = two_tables(FrequencyPolicy.BY_CURRENT_LENGTH)
    assert moves_within(moving.group_of(0).rotary, reach) is (word is VerdictWord.REJECT)
    assert verdict_of(moving, make_contract(), reach).word is word
    raw = with_rotary(moving, key_state=KeyState.RAW)
    expected = VerdictWord.REJECT if word is VerdictWord.REJECT else VerdictWord.CONVERT
    assert verdict_of(raw, make_contract(), reach).word is expected


def test_formulas_are_compared_where_no_numbers_reach() -> None:
    policy = FrequencyPolicy.BY_REQUEST_LENGTH
    one, other = (
        with_rotary(
            make_contract(),
            frequency_policy=policy,
            formula=FrequencyFormula(name="dynamic_ntk", parameters=(factor,)),
            tables=(RotaryTable(inv_freq=TABLE, amplitude=1.0, upper_length=32),),
        )
        for factor in (2.0, 4.0)
    )
    assert verdict_of(one, one, 64).differences == ()
    assert verdict_of(one, other, 32).differences == ()
    assert [part.field for part in verdict_of(one, other, 64).differences] == ["frequency_policy"]
    assert verdict_of(one, make_contract(), 64).word is VerdictWord.REJECT
    assert verdict_of(with_rotary(one, key_state=KeyState.RAW), one, 64).word is VerdictWord.REJECT
