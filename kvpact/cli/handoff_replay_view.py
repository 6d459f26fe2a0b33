"""A replay for people: whether it ended as recorded, and what differs."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from kvpact.cli.handoff_replay import Replayed
from kvpact.cli.output import console, show


def print_replay(file: str, replayed: Replayed) -> None:
    """A headline, the facts of both endings, notes, and what was decoded."""
    replay = replayed.replay
    differences = {each.fact for each in replay.differences()}
    words = "[red]ends otherwise[/red]" if differences else "[green]ends as it did[/green]"
    console.print(f"[bold]{escape(file)}[/bold]: {words}", highlight=False, soft_wrap=True)
    recorded, found = replay.recorded.facts(), replay.replayed.facts()
    table = Table("", "recorded", *(["now"] if differences else []))
    for fact in (*recorded, *(name for name in found if name not in recorded)):
        one, other = (escape(facts.get(fact, "-")) for facts in (recorded, found))
        if not differences:
            table.add_row(fact, one)
        elif fact in differences:
            table.add_row(f"[red]{fact}[/red]", f"[red]{one}[/red]", f"[red]{other}[/red]")
        else:
            table.add_row(fact, one, other)
    show(table)
    for note in replay.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if replayed.token_ids:
        console.print(f"tokens: {list(replayed.token_ids)}", highlight=False, markup=False, soft_wrap=True)
    if replayed.text is not None:
        console.print(f"text: {replayed.text!r}", highlight=False, markup=False, soft_wrap=True)
