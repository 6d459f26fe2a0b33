"""Verdicts by length: a pair that parts at long requests serves the short ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract import judge
from kvpact.contract.compare import Policy, compare, compare_at, pairing_reach
from kvpact.contract.contract import Contract, FrequencyFormula, RotaryTable
from kvpact.contract.judge import LengthBook, judge_at, judge_pair
from kvpact.contract.rope import DYNAMIC_FORMULA, formula_table
from kvpact.types import DifferenceAction, FrequencyPolicy, KeyState, Verdict, VerdictWord
from tests.factories import make_contract, make_inv_freq, with_rotary

POLICIES = FrequencyPolicy


def two_tables(policy: FrequencyPolicy, *, long_theta: float = 1e6, context_tokens: int = 128) -> Contract:
    """Short up to 32 tokens, that length included."""
    tables = (
        RotaryTable(inv_freq=make_inv_freq(), amplitude=1.0, upper_length=32),
        RotaryTable(inv_freq=make_inv_freq(theta=long_theta), amplitude=1.0),
    )
    return with_rotary(make_contract(context_tokens=context_tokens), tables=tables, frequency_policy=policy)


def refused(verdict: Verdict) -> set[str]:
    return {part.field for part in verdict.differences if part.action is DifferenceAction.REJECT}


@pytest.mark.parametrize(
    ("table_length", "word"), [(31, "accept"), (32, "accept"), (33, "reject"), (40, "reject")]
)
@pytest.mark.parametrize("writes", [POLICIES.BY_CURRENT_LENGTH, POLICIES.FROZEN])
def test_a_request_past_the_first_switch_of_a_moving_side_is_refused_at_its_length(
    writes: FrequencyPolicy, table_length: int, word: str
) -> None:
    writer = two_tables(writes) if writes is not POLICIES.FROZEN else make_contract(context_tokens=128)
    reader = two_tables(POLICIES.BY_CURRENT_LENGTH)
    verdict = judge_at(writer, reader, Policy(), table_length)
    assert verdict.word == word
    if word == "reject":
        assert "frequency_policy" in refused(verdict)


def test_a_moving_pair_is_not_refused_when_it_pairs_and_says_where_it_ends() -> None:
    moving = two_tables(POLICIES.BY_CURRENT_LENGTH)
    verdict = judge_pair(moving, moving, Policy())
    (difference,) = verdict.differences
    assert (verdict.word, difference.field) == (VerdictWord.ACCEPT, "frequency_policy")
    assert "more than 32 tokens are refused" in difference.explanation


def test_a_raw_side_that_moves_converts_short_requests_only() -> None:
    raw = with_rotary(two_tables(POLICIES.BY_CURRENT_LENGTH), key_state=KeyState.RAW)
    assert judge_pair(raw, make_contract(context_tokens=128), Policy()).word is VerdictWord.CONVERT
    assert judge_at(raw, make_contract(context_tokens=128), Policy(), 33).word is VerdictWord.REJECT


def test_tables_that_differ_at_every_length_are_refused_when_they_pair() -> None:
    served = POLICIES.BY_SERVED_LENGTH
    verdict = judge_pair(two_tables(served, context_tokens=32), two_tables(served), Policy())
    assert verdict.word is VerdictWord.REJECT
    assert "inv_freq" in refused(verdict)


def test_another_difference_is_refused_whatever_the_length() -> None:
    moving = two_tables(POLICIES.BY_CURRENT_LENGTH)
    other = replace(moving, model=replace(moving.model, function_digest=b"x" * 32))
    assert {"function_digest", "frequency_policy"} <= refused(judge_pair(moving, other, Policy()))


def test_request_lengths_are_judged_by_their_own_tables() -> None:
    by_request = POLICIES.BY_REQUEST_LENGTH
    writer, reader = two_tables(by_request), two_tables(by_request, long_theta=1e5)
    book = LengthBook(writer, reader, Policy(), judge_pair(writer, reader, Policy()))
    words = [book.verdict(length).word for length in (1, 32, 33, 128)]
    assert words == [VerdictWord.ACCEPT, VerdictWord.ACCEPT, VerdictWord.REJECT, VerdictWord.REJECT]


@pytest.mark.parametrize("policy", [POLICIES.FROZEN, POLICIES.BY_REQUEST_LENGTH])
def test_a_known_pair_is_not_compared_again(policy: FrequencyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = two_tables(policy) if policy is not POLICIES.FROZEN else make_contract(context_tokens=128)
    book = LengthBook(contract, contract, Policy(), judge_pair(contract, contract, Policy()))
    first = [book.verdict(length) for length in (20, 100)]
    monkeypatch.setattr(judge, "compare_at", None)
    assert [book.verdict(length) for length in (21, 101)] == first
    assert pairing_reach(contract, contract) == 128


def test_a_length_between_switches_is_judged_for_itself_where_the_longest_is_refused() -> None:
    writer = two_tables(POLICIES.BY_REQUEST_LENGTH, context_tokens=4096)
    tables = writer.layer_groups[0].rotary.tables
    reader = with_rotary(writer, tables=(tables[0], replace(tables[1], inv_freq=_nudged(tables[1], 1e-4))))
    book = LengthBook(writer, reader, Policy(), judge_pair(writer, reader, Policy()))
    assert book.verdict(4096).word is VerdictWord.REJECT
    assert book.verdict(200).word is VerdictWord.ACCEPT
    assert book.verdict(203).word is VerdictWord.REJECT


def dynamic(*, frozen_at: int | None = None) -> Contract:
    """Serves 4096 tokens: its own table up to 64, then one for each length; or one of them for all."""
    formula = FrequencyFormula(name=DYNAMIC_FORMULA, parameters=(1e4, 16.0, 2.0, 64.0))
    base = make_contract(context_tokens=4096)
    if frozen_at is not None:
        table = replace(formula_table(formula, frozen_at), upper_length=None)
        return with_rotary(base, tables=(table,))
    tables = (RotaryTable(inv_freq=make_inv_freq(), amplitude=1.0, upper_length=64),)
    policy = POLICIES.BY_REQUEST_LENGTH
    return with_rotary(base, tables=tables, formula=formula, frequency_policy=policy)


def test_where_a_formula_gives_the_tables_each_length_is_judged_for_itself() -> None:
    for writer, reader in (
        (dynamic(), dynamic(frozen_at=4096)),
        (dynamic(frozen_at=4096), dynamic()),
        (dynamic(), dynamic(frozen_at=64)),
        (dynamic(), dynamic()),
    ):
        book = LengthBook(writer, reader, Policy(), judge_pair(writer, reader, Policy()))
        for length in (4096, 100, 64, 65, 30, 2000, 100, 4095):
            verdict = judge_at(writer, reader, Policy(), length)
            assert book.verdict(length).word is verdict.word, length
            assert refused(book.verdict(length)) == refused(verdict), length
    apart = judge_at(dynamic(), dynamic(frozen_at=4096), Policy(), 100)
    assert apart.word is VerdictWord.REJECT


def test_a_book_keeps_a_bounded_number_of_lengths() -> None:
    book = LengthBook(dynamic(), dynamic(), Policy(), judge_pair(dynamic(), dynamic(), Policy()))
    for length in range(100, 400):
        book.verdict(length)
    assert len(book._known) == judge.KEPT_VERDICTS


@pytest.mark.parametrize("turned", [False, True])
def test_a_pair_that_agrees_at_its_longest_request_alone_is_refused_for_all_lengths(turned: bool) -> None:
    sides = (dynamic(frozen_at=4096), dynamic()) if turned else (dynamic(), dynamic(frozen_at=4096))
    assert compare_at(*sides, Policy(), 4096).word is VerdictWord.ACCEPT
    verdict = compare(*sides, Policy(), 4096)
    assert (verdict.word, refused(verdict)) == (VerdictWord.REJECT, {"inv_freq"})
    (difference,) = (part for part in verdict.differences if part.field == "inv_freq")
    assert difference.explanation.startswith("requests of 64 tokens are refused; ")


def test_a_pair_whose_short_tables_differ_is_refused_for_all_lengths() -> None:
    writer = two_tables(POLICIES.BY_REQUEST_LENGTH)
    reader = with_rotary(writer, tables=writer.layer_groups[0].rotary.tables[1:])
    assert compare_at(writer, reader, Policy(), 128).word is VerdictWord.ACCEPT
    (difference,) = compare(writer, reader, Policy(), 128).differences
    assert difference.explanation.startswith("requests of 32 tokens are refused; ")


@pytest.mark.parametrize("frozen_at", [64, 300])
def test_one_of_a_formulas_tables_serves_no_other_length(frozen_at: int) -> None:
    verdict = compare(dynamic(), dynamic(frozen_at=frozen_at), Policy(), 4096)
    assert verdict.word is VerdictWord.REJECT
    same = compare(dynamic(), dynamic(), Policy(), 4096)
    assert (same.word, same.differences) == (VerdictWord.ACCEPT, ())


def _nudged(table: RotaryTable, rad_per_position: float) -> tuple[float, ...]:
    return tuple(number + rad_per_position * (i == 3) for i, number in enumerate(table.inv_freq))
