"""Tables of facts that are never cut: a terminal that is too narrow lacks what matters least."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpact.cli.output import console, show

UNBOUNDED = 10_000
LEAST_TEXT = 24
"""Characters in a line of a column of text, which is broken between words."""
Rows = Sequence[Sequence[str]]


def show_columns(
    headings: Sequence[str],
    rows: Rows,
    *,
    spare: Sequence[str] = (),
    texts: Collection[str] = (),
    on: Console = console,
) -> None:
    """Prints a table; where there is no terminal, as wide as it is.

    Args:
        headings: one for each column.
        rows: cells by column.
        spare: headings of columns that may be left out, the first one first.
        texts: headings of columns whose cells may have several lines.
    """
    if not on.is_terminal:
        show(_table(headings, rows, texts), on=Console(width=UNBOUNDED))
        return
    for left_out in range(len(spare) + 1):
        kept = [at for at, heading in enumerate(headings) if heading not in spare[:left_out]]
        names, cells = [headings[at] for at in kept], [[row[at] for at in kept] for row in rows]
        if _width(names, cells, texts) <= on.width:
            show(_table(names, cells, texts), on=on)
            return
    for line in _stacked(names, cells):
        on.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(headings: Sequence[str], rows: Rows, texts: Collection[str]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading not in texts)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _width(headings: Sequence[str], rows: Rows, texts: Collection[str]) -> int:
    """Characters in a line of a table at least: spaces on both sides of each cell, and one between."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    least = [
        min(width, LEAST_TEXT) if heading in texts else width
        for heading, width in zip(headings, widths, strict=True)
    ]
    return sum(width + 3 for width in least) + 1


def _stacked(headings: Sequence[str], rows: Rows) -> Iterator[str]:
    """Facts below each other, without those that are empty."""
    for row in rows:
        yield ""
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                yield f"{heading}: {cell}"
