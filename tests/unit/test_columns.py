"""Names and addresses are never cut, however narrow a terminal is; what matters less is left out first."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvpact.cli.columns import show_columns
from kvpact.cli.status import SPARE_FACTS, WORKER_FACTS

NAME, ENDPOINT = "decode-of-the-second-release-0", "[fd00::1]:41234"
STATE = "no prefill worker can share a cache with it: they differ in inv_freq, function_digest"
ROW = [NAME, "decode", ENDPOINT, "0123456789ab", "1", "2", "60/64", "handoff 4", STATE]


def shown(width: int) -> str:
    """The table on a terminal of so many characters."""
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_columns(WORKER_FACTS, [ROW, ROW], spare=SPARE_FACTS, texts=("state",), on=terminal)
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 250])
def test_who_and_where_are_whole_at_any_width(width: int) -> None:
    told = shown(width)
    assert told.count(NAME) == told.count(ENDPOINT) == 2
    assert "…" not in told
    for word in STATE.split():
        assert word in told


def test_what_matters_less_is_left_out_on_a_narrow_terminal_only() -> None:
    assert "0123456789ab" not in shown(80)
    assert max(map(len, shown(80).splitlines())) <= 80
    assert f"endpoint: {ENDPOINT}" in shown(40)
    for cell in ROW:
        assert cell in shown(250)


def test_where_there_is_no_terminal_each_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_columns(WORKER_FACTS, [ROW], spare=SPARE_FACTS, texts=("state",), on=Console(width=80))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if NAME in line)
    for cell in ROW:
        assert cell in line
