"""What a person reads: the sentence on a refused table, and the whole verdict as plain lines."""

from __future__ import annotations

import math

import pytest

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import RotaryTable
from kvpact.contract.explain import explain_gap, explain_tables, render_verdict
from kvpact.types import AxisOrder, KeyState
from tests.factories import make_contract, make_group, make_rotary, with_rotary

DEEP = (
    "; turning the keys again can't repair it, nor can raw keys, since deeper layers' keys come from states "
    "that were computed with the writer's table"
)


def sentence(writer_rad: float, reader_rad: float, reach: int, writer_amplitude: float = 1.0) -> str:
    """The explanation for tables of one lane, without its fixed end."""
    text = explain_gap(
        RotaryTable(inv_freq=(writer_rad,), amplitude=writer_amplitude),
        RotaryTable(inv_freq=(reader_rad,), amplitude=1.0),
        reach=reach,
    )
    assert text.endswith(DEEP)
    return text.removesuffix(DEEP)


def test_a_large_gap_states_phases_one_radian_and_a_full_bound() -> None:
    assert sentence(0.5, 0.25, reach=4096) == (
        "the writer's keys are off by 0.25 rad at position 1, 32 rad at position 128 and 1024 rad at "
        "position 4095 (lane pair 0); a lane passes 1 rad from position 5 on; "
        "one attention logit moves by up to 2 |q||k| times the softmax scale"
    )


def test_a_small_gap_says_where_one_radian_would_lie() -> None:
    assert sentence(0.001, 0.0, reach=513) == (
        "the writer's keys are off by 0.001 rad at position 1, 0.128 rad at position 128 and 0.512 rad at "
        "position 512 (lane pair 0); no lane passes 1 rad before position 1001, beyond reach; "
        f"one attention logit moves by up to {2 * math.sin(0.256):.4g} |q||k| times the softmax scale"
    )


@pytest.mark.parametrize(
    ("reach", "positions"),
    [
        (2, "0.25 rad at position 1 ("),
        (3, "0.25 rad at position 1 and 0.5 rad at position 2 ("),
        (129, "0.25 rad at position 1 and 32 rad at position 128 ("),
        (130, "0.25 rad at position 1, 32 rad at position 128 and 32.25 rad at position 129 ("),
    ],
)
def test_only_positions_within_reach_are_named(reach: int, positions: str) -> None:
    assert sentence(0.5, 0.25, reach).startswith(f"the writer's keys are off by {positions}")


def test_an_amplitude_enters_the_bound() -> None:
    assert "up to 2.5 |q||k|" in sentence(0.5, 0.25, 4096, writer_amplitude=1.5)


def test_groups_are_explained_by_the_table_at_the_reach() -> None:
    writer, reader = (make_group(rotary=make_rotary(theta=theta)) for theta in (1e4, 1e5))
    tables = (writer.rotary.tables[0], reader.rotary.tables[0])
    assert explain_tables(writer, reader, 64) == explain_gap(*tables, reach=64)
    assert explain_tables(with_rotary(make_contract(), tables=()).layer_groups[0], reader, 64) == ""


ACCEPTED = """\
verdict: accept - the decode side can use the prefill side's cache as it is
identity: not_compared (a digest is unknown; the rest holds if both run one model)
exactness: bit_exact
differences: none"""

CONVERTED = """\
verdict: convert - the decode side can use the prefill side's cache after a conversion on landing
identity: equal
exactness: rounding
differences: 2
  key_state (layers 0-1): convertible, convert
    prefill (writer): rotated
    decode (reader):  raw
    why: read without a conversion, a key would be rotated twice or not at all
    do:  nothing to do; to have no difference, set the same key_state on both sides: \
prefill.cache.key_state and decode.cache.key_state in the config file, or --prefill-cache key_state=... \
and --decode-cache key_state=...
  axis_order: convertible, convert
    prefill (writer): NHD
    decode (reader):  HND
    do:  nothing to do; to have no difference, set the same axis_order on both sides: \
prefill.cache.axis_order and decode.cache.axis_order in the config file, or --prefill-cache \
axis_order=... and --decode-cache axis_order=...
plan: unrotate (rounding, within 6 epsilons), relayout (bit_exact)"""

REFUSED = """\
verdict: reject - the decode side can't use the prefill side's cache
identity: equal
exactness: bit_exact
differences: 1
  inv_freq (layers 0-1): incompatible, reject
    prefill (writer): [1] 0.316228 (7 of 8 differ)
    decode (reader):  [1] 0.237137 (7 of 8 differ)
    why: the writer's keys are off by 0.07909 rad at position 1, 10.12 rad at position 128 and 323.9 \
rad at position 4095 (lane pair 1); a lane passes 1 rad from position 13 on; one attention logit moves \
by up to 2 |q||k| times the softmax scale; turning the keys again can't repair it, nor can raw keys, \
since deeper layers' keys come from states that were computed with the writer's table
    do:  give both sides one rope configuration: remove or equalise rope_theta, rope_scaling and \
rope_parameters in prefill.override and decode.override (--prefill-override, --decode-override) or in \
config.json"""


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (make_contract(function_digest=None), ACCEPTED),
        (make_contract(key_state=KeyState.RAW, axis_order=AxisOrder.HND), CONVERTED),
        (make_contract(theta=1e5), REFUSED),
    ],
)
def test_a_verdict_reads_as_written_here(reader: object, text: str) -> None:
    writer = make_contract()
    assert render_verdict(compare(writer, reader, Policy(), 4096)) == text  # type: ignore[arg-type]
