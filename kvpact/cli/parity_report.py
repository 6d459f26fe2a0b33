"""Parity reports as JSON and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from kvpact.cli.output import console

if TYPE_CHECKING:
    from kvpact.cli.parity_compare import LegReport, QuantityReport

HEADINGS = ("keys", "values", "attention\nlogits", "attention\noutputs", "final\nlogits")


def report_to_json(report: LegReport) -> dict[str, Any]:
    """One leg at one length."""
    found = report.divergence
    return {
        "leg": report.leg,
        "prompt_tokens": report.prompt_tokens,
        "passed": report.passed,
        "tolerance": report.tolerance,
        "attention_max_abs": list(report.attention_max_abs),
        "logits_max_abs": report.logits_max_abs,
        "logits_max_rel": report.logits_max_rel,
        "quantities": {quantity.name: _quantity_to_json(quantity) for quantity in report.quantities},
        "first_divergence": found
        and {
            "layer": found.layer,
            "position": found.position,
            "head": found.head,
            "key_position": found.key_position,
            "reference": found.reference,
            "found": found.found,
        },
    }


def print_reports(reports: Sequence[LegReport]) -> None:
    """A row for each leg, then in words where each failed one first goes wrong."""
    table = Table(
        title="largest difference: absolute, and relative to the largest number of its layer",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("prompt", justify="right")
    for name in ("leg", *HEADINGS, "result"):
        table.add_column(name)
    for report in reports:
        worst = [f"{max(each.max_abs):.1e}\n{max(each.max_rel):.1e}" for each in report.quantities]
        final = f"{report.logits_max_abs:.1e}\n{report.logits_max_rel:.1e}"
        result = "[green]equal[/green]" if report.passed else "[red]differs[/red]"
        table.add_row(str(report.prompt_tokens), report.leg, *worst, final, result)
    console.print(table)
    for report in reports:
        if not report.passed:
            console.print(explain(report), highlight=False, soft_wrap=True)


def explain(report: LegReport) -> str:
    """Where a leg that didn't pass first parts from the reference."""
    where, found = f"{report.leg}, {report.prompt_tokens} prompt tokens", report.divergence
    lines = []
    if report.first is not None:
        name, place = report.first
        lines.append(
            f"{where}: {name.replace('_', ' ')} are the first to differ: layer {place.layer}, "
            f"head {place.head}, position {place.position}: {place.reference:.5f} became {place.found:.5f}"
        )
    if found is not None:
        lines.append(
            f"{where}: diverges at layer {found.layer}, position {found.position}: head {found.head}, "
            f"key position {found.key_position}: "
            f"attention logit {found.reference:.5f} became {found.found:.5f}"
        )
    if not lines:
        lines.append(f"{where}: layers are equal, final logits are off by {report.logits_max_abs:.2e}")
    return "\n".join(lines)


def _quantity_to_json(quantity: QuantityReport) -> dict[str, Any]:
    first = quantity.first
    return {
        "max_abs": list(quantity.max_abs),
        "max_rel": list(quantity.max_rel),
        "first": first
        and {
            "layer": first.layer,
            "head": first.head,
            "position": first.position,
            "reference": first.reference,
            "found": first.found,
        },
    }
