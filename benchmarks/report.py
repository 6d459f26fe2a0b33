"""A benchmark's rows and ratios, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Literal

from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value; None where it is missing."""

    name: str
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Two values of one run against each other, with the one to aim at; None where one of them is missing."""

    name: str
    value: float | None
    target: float
    better: Literal["low", "high"]

    @property
    def met(self) -> bool:
        """Whether there is a value, on the good side of the target."""
        if self.value is None:
            return False
        return self.value <= self.target if self.better == "low" else self.value >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run measured. Nothing here judges: a slow machine is not a failure."""

    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """What could not be measured here, and why."""

    def write(self, file: Path) -> None:
        """As JSON: {"rows": [...], "ratios": [...]}; a missing value is null."""
        result = {"rows": [asdict(row) for row in self.rows], "ratios": [asdict(it) for it in self.ratios]}
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """As two tables on standard output."""
        rows = Table(Column("what", no_wrap=True), "value", "unit")
        for row in self.rows:
            rows.add_row(row.name, _shown(row.value, ".4g"), row.unit)
        ratios = Table(Column("ratio", no_wrap=True), "value", "target", "")
        for ratio in self.ratios:
            bound = f"{'<=' if ratio.better == 'low' else '>='} {ratio.target:g}"
            word = "" if ratio.value is None else "met" if ratio.met else "missed"
            ratios.add_row(ratio.name, _shown(ratio.value, ".3f"), bound, word)
        console = Console(width=120)
        console.print(rows)
        console.print(ratios)
        for name, why in self.missing.items():
            console.print(f"MISSING {name}: {why}", highlight=False, markup=False)


def _shown(value: float | None, form: str) -> str:
    return "MISSING" if value is None else format(value, form)


def seconds_of(work: Callable[[], object], *, repeats: int) -> float:
    """Median CPU time of one call on this thread, the first one left out; others' work doesn't count."""
    work()
    times = []
    for _ in range(repeats):
        start = thread_time()
        work()
        times.append(thread_time() - start)
    return median(times)


def seconds_side_by_side(works: list[Callable[[], object]], *, repeats: int) -> list[float]:
    """Median CPU time of one call of each on this thread, taken in turns so that all see the same caches."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, own in zip(works, times, strict=True):
            start = thread_time()
            work()
            own.append(thread_time() - start)
    return [median(own) for own in times]
