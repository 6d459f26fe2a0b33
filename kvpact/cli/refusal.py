"""Why two sides can't share a cache, for people: what refuses, both values, why and what to do."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpact.types import Difference, DifferenceAction, Verdict


def picture_refusal(verdict: Verdict) -> RenderableType:
    """The differences that refuse, one block each; nothing for a verdict that accepts or converts."""
    refusing = [each for each in verdict.differences if each.action is DifferenceAction.REJECT]
    return Group(*(_block(difference) for difference in refusing))


def _block(difference: Difference) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    rows = (
        ("prefill", difference.writer),
        ("decode", difference.reader),
        ("why", difference.explanation),
        ("do", difference.remedy),
    )
    for name, text in rows:
        if text:
            facts.add_row(name, Text(text))
    return Group(
        Text(f"{difference.field} ({difference.action})", style="bold"), Padding(facts, (0, 0, 0, 2))
    )
