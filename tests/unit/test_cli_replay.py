"""`kvpact handoff replay` exits with 0 for the same outcome, 20 for another, 3 for what can't be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.handoff.capture_file import read_capture, write_capture
from kvpact.handoff.messages import Chunk
from tests.contract.golden.make import FOLDER


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["handoff", "replay", *arguments, "--json"])
    return result.exit_code, dict(json.loads(result.stdout))


def changed(path: Path) -> Path:
    """A whole file in which the bytes of one chunk aren't those of its checksum."""
    capture = read_capture(FOLDER / "rotated_nhd16.kvpact")
    parts = tuple(
        replace(part, keys=bytes(len(part.keys))) if isinstance(part, Chunk) else part
        for part in capture.parts
    )
    write_capture(path, replace(capture, parts=parts))
    return path


def test_a_good_handoff_ends_as_it_did() -> None:
    code, facts = run(str(FOLDER / "rotated_nhd16_to_raw_hnd24.kvpact"))
    assert (code, facts["same"], facts["differences"], facts["notes"]) == (0, True, [], [])
    assert facts["recorded"] == facts["replayed"]
    assert facts["replayed"]["outcome"] == "committed"


def test_a_caught_lie_is_caught_again() -> None:
    code, facts = run(str(FOLDER / "lie_axes_swapped.kvpact"))
    assert (code, facts["replayed"]["reason"], facts["replayed"]["error.check"]) == (
        0,
        "DATA_LOSS",
        "witness",
    )


def test_another_outcome_exits_20_and_says_both(tmp_path: Path) -> None:
    code, facts = run(str(changed(tmp_path / "changed.kvpact")))
    assert (code, facts["same"]) == (20, False)
    assert {"fact": "outcome", "recorded": "committed", "replayed": "failed at push"} in facts["differences"]
    assert facts["replayed"]["error.check"] == "checksum"


def test_people_get_both_columns_only_where_something_differs(tmp_path: Path) -> None:
    same = CliRunner().invoke(app, ["handoff", "replay", str(FOLDER / "rotated_nhd16.kvpact")])
    assert "ends as it did" in same.stdout
    assert "now" not in same.stdout.split()
    other = CliRunner().invoke(app, ["handoff", "replay", str(changed(tmp_path / "changed.kvpact"))])
    assert other.exit_code == 20
    assert "ends otherwise" in other.stdout
    assert "checksum" in other.stdout


def test_a_flipped_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    data = (FOLDER / "rotated_nhd16.kvpact").read_bytes()
    for index in range(0, len(data), 1500):
        (tmp_path / "flipped.kvpact").write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        code, facts = run(str(tmp_path / "flipped.kvpact"))
        assert (code, facts["error"]["reason"]) == (3, "UNREADABLE_SOURCE")


@pytest.mark.parametrize("name", ["none.kvpact", "missing_scale.kvpact"])
def test_what_cannot_be_read_exits_3(name: str) -> None:
    assert run(str(FOLDER / name))[0] == 3


@pytest.mark.parametrize(
    "flags", [("--tokens", "4"), ("--cache", "block_size=8"), ("--override", "rope_theta=1")]
)
def test_flags_of_the_model_need_one(flags: tuple[str, ...]) -> None:
    code, facts = run(str(FOLDER / "rotated_nhd16.kvpact"), *flags)
    assert (code, facts["error"]["param"]) == (2, "--model")
    assert facts["error"]["message"].startswith(f"{flags[0]}: ")


def test_a_long_file_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.cli.handoff_replay.LONG", 3)
    result = CliRunner().invoke(app, ["handoff", "replay", str(FOLDER / "rotated_nhd16.kvpact")])
    assert "2 of 4 messages" in result.stderr
