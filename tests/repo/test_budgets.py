"""Files and functions stay short enough to read, and each file says its one idea first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, package_files, parse

FILE_LINES = 300
FUNCTION_LINES = 40
ACTOR_LINES = 80
FILES = [pytest.param(file, id=str(file)) for file in package_files()]
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}


def raised_budgets() -> dict[str, int]:
    """Budgets that decision notes raise: lines like "Budget: `kvpact/x.py::function` 55 lines"."""
    notes = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    pattern = re.compile(r"^Budget: `([^`]+)` (\d+) lines", re.MULTILINE)
    return {
        name: int(lines)
        for note in notes
        for name, lines in pattern.findall(note.read_text(encoding="utf-8"))
    }


RAISED = raised_budgets()


def over_budget(name: str, lines: int, budget: int) -> str | None:
    """What to say when a file or function is too long, None when it isn't."""
    allowed = RAISED.get(name, budget)
    if lines <= allowed:
        return None
    return f"{name} has {lines} lines, budget {allowed}: split it, or raise it by a note in docs/decisions"


def long_functions(file: Path) -> list[str]:
    """One complaint for each function or method over its budget."""
    functions = (
        node for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    found = (
        over_budget(
            f"{file}::{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1, FUNCTION_LINES
        )
        for node in functions
    )
    return [complaint for complaint in found if complaint]


@pytest.mark.parametrize("file", FILES)
def test_a_file_stays_within_its_budget(file: Path) -> None:
    lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    budget = ACTOR_LINES if file.name == "actor.py" else FILE_LINES
    assert over_budget(str(file), lines, budget) is None


@pytest.mark.parametrize("file", FILES)
def test_each_function_stays_within_its_budget(file: Path) -> None:
    assert long_functions(file) == []


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_its_idea_in_the_first_line_and_an_init_says_nothing(file: Path) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.name == "__init__.py":
        assert text == "", "a package's __init__ imports nothing and holds nothing"
    else:
        first = text.split("\n", 1)[0]
        assert re.fullmatch(r'"""[A-Z`].*[.:;](""")?', first), (
            f"first line is {first!r}, expected its idea as a sentence"
        )


def test_no_file_is_named_for_nothing() -> None:
    assert [str(file) for file in package_files() if file.stem in NAMES_THAT_SAY_NOTHING] == []


def test_a_function_over_budget_is_found() -> None:
    assert over_budget("kvpact/none.py::f", FUNCTION_LINES + 1, FUNCTION_LINES) is not None
