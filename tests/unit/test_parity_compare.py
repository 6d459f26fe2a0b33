"""A parity report compares every quantity, names the first place that is off, and says so in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpact.cli.parity_compare import QUANTITIES, LegReport, compare_legs
from kvpact.cli.parity_plot import draw
from kvpact.cli.parity_report import explain, report_to_json
from kvpact.engine.probe import Trace
from kvpact.engine.trace import Attended, StateRecorder
from kvpact.types import LaneOrder
from tests.factories import make_contract

torch.set_num_threads(1)
POSITION, LAYERS, HEADS, LANES = 5, 2, 2, 16
TOLERANCE = 1e-4


def trace(*, layers: int = LAYERS, position: int = POSITION, scale: float = 1.0) -> Trace:
    """One decoded row over random rows; four query heads."""
    draw_from = torch.Generator().manual_seed(0)
    recorder = StateRecorder(frozenset({position}))
    for layer in range(layers):
        recorder.record(
            Attended(
                layer=layer,
                query_positions_T=torch.tensor([position]),
                q_TQD=torch.randn((1, 4, LANES), generator=draw_from),
                key_positions_n=torch.arange(position + 1),
                k_nHD=scale * torch.randn((position + 1, HEADS, LANES), generator=draw_from),
                v_nHD=scale * torch.randn((position + 1, HEADS, LANES), generator=draw_from),
                out_TQD=torch.randn((1, 4, LANES), generator=draw_from),
                scale=0.25,
            )
        )
    logits = torch.randn((1, 8), generator=draw_from)
    return Trace(attention=recorder, logits_nV=logits, token_ids=(1,))


def compared(found: Trace, expected: Trace | None = None, **facts: LaneOrder) -> LegReport:
    reader = make_contract(**facts)  # type: ignore[arg-type]
    return compare_legs("handoff", POSITION, expected or trace(), found, reader=reader, tolerance=TOLERANCE)


def test_equal_traces_pass_in_every_quantity() -> None:
    report = compared(trace())
    assert report.passed
    assert report.first is None
    assert all(max(quantity.max_abs) == max(quantity.max_rel) == 0 for quantity in report.quantities)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_one_number_that_is_off_is_named_by_layer_head_and_position(name: str) -> None:
    found = trace()
    rows = getattr(found.attention, name)[1]
    rows[3, 1, 7] += 0.5
    report = compared(found)
    assert not report.passed
    assert report.first is not None
    first, place = report.first
    assert (first, place.layer, place.head, place.position) == (name, 1, 1, 3)
    assert place.found - place.reference == pytest.approx(0.5)
    quantity = report.quantity(name)
    assert quantity.max_abs[0] == 0
    assert quantity.max_abs[1] == pytest.approx(0.5)
    largest = float(getattr(trace().attention, name)[1].abs().max())
    assert quantity.max_rel[1] == pytest.approx(0.5 / largest)
    assert quantity.by_position_Ln.nonzero().tolist() == [[1, 3]]


def test_an_output_that_is_off_is_at_the_query_s_position() -> None:
    found = trace()
    found.attention.outputs[0, POSITION][2, 3] += 1
    first = compared(found).first
    assert first is not None
    assert (first[0], first[1].layer, first[1].head, first[1].position) == (
        "attention_outputs",
        0,
        2,
        POSITION,
    )


def test_of_several_the_lowest_layer_and_then_the_order_of_computation_counts() -> None:
    found = trace()
    found.attention.keys[1][0, 0, 0] += 1
    found.attention.outputs[0, POSITION][0, 0] += 1
    found.attention.values[0][4, 0, 0] += 1
    first = compared(found).first
    assert first is not None
    assert (first[0], first[1].layer) == ("values", 0)


def test_a_number_that_is_none_is_infinitely_far_off() -> None:
    found = trace()
    found.attention.keys[0][2, 0, 0] = torch.nan
    report = compared(found)
    assert report.quantity("keys").max_abs[0] == float("inf")
    assert not report.passed


@pytest.mark.parametrize(("off", "passes"), [(5e-3, True), (2e-2, False)])
def test_keys_may_be_off_by_as_much_of_the_largest(off: float, passes: bool) -> None:
    expected, found = trace(scale=50.0), trace(scale=50.0)
    found.attention.keys[0][2, 0, 0] += off
    assert (compared(found, expected).quantity("keys").first is None) == passes


def test_keys_in_adjacent_lanes_are_compared_lane_by_lane() -> None:
    found = trace()
    for layer, k_nHD in found.attention.keys.items():
        found.attention.keys[layer] = k_nHD.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    assert compared(found, stored_lane_order=LaneOrder.ADJACENT).passed
    assert not compared(found).passed


def test_final_logits_alone_are_told_too() -> None:
    found = trace()
    found.logits_nV[0, 0] += 1
    report = compared(found)
    assert not report.passed
    assert report.logits_max_rel == pytest.approx(1 / float(trace().logits_nV.abs().max()))
    assert explain(report) == "handoff, 5 prompt tokens: layers are equal, final logits are off by 1.00e+00"


def test_words_and_json_name_the_same_place() -> None:
    found = trace()
    found.attention.values[1][3, 1, 7] += 0.5
    report = compared(found)
    assert "values are the first to differ: layer 1, head 1, position 3" in explain(report)
    facts = report_to_json(report)
    assert list(facts["quantities"]) == list(QUANTITIES)
    assert facts["quantities"]["values"]["first"]["position"] == 3
    assert facts["quantities"]["keys"]["first"] is None
    assert facts["first_divergence"] is None, "attention logits are right"


@pytest.mark.parametrize("damage", [0.0, float("nan"), 1e9])
def test_any_report_can_be_drawn(tmp_path: Path, damage: float) -> None:
    found = trace(layers=1)
    found.attention.keys[0][2, 0, 0] += damage
    draw([compared(found, trace(layers=1))], tmp_path / "one.svg", model="one layer")
    assert "</svg>" in (tmp_path / "one.svg").read_text(encoding="utf-8")
