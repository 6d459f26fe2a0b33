"""`kvpact handoff show` tells what a file holds and judges it again, for the recorded reader or another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.contract.jsonform import contract_from_json
from kvpact.contract.ledger import ledger
from kvpact.handoff.capture_file import read_capture, write_capture
from kvpact.handoff.messages import Chunk
from tests.contract.golden.make import FOLDER


def shown(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["handoff", "show", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_good_handoff_shows_everything_as_json() -> None:
    file = FOLDER / "rotated_nhd16_to_raw_hnd24.kvpact"
    facts = shown(str(file))
    writer = contract_from_json(facts["contract"])
    assert writer == replace(read_capture(file).writer_contract(), model=writer.model)
    assert (facts["verdict"], facts["recorded_verdict"], facts["outcome"]) == (
        "convert",
        "convert",
        "committed",
    )
    assert [step["op"] for step in facts["plan"]] == ["unrotate", "relayout", "reblock"]
    assert facts["ledger"]["handoff_bytes"] == ledger(writer, 20).handoff_bytes
    assert facts["ledger"]["handoff_bytes"] == sum(
        chunk["key_bytes"] + chunk["value_bytes"] for chunk in facts["chunks"]
    )
    assert all(chunk["checksum_holds"] for chunk in facts["chunks"])
    assert facts["contract_digest_holds"]
    assert {witness["layer"] for witness in facts["witnesses"]} == {0, 1}
    assert facts["terms"]["next_position"] == 20
    assert facts["error"] is None


def test_another_reader_is_judged_anew() -> None:
    facts = shown(
        str(FOLDER / "wrong_theta.kvpact"), "--reader", str(FOLDER / "readers" / "rotated_nhd16.json")
    )
    assert (facts["recorded_verdict"], facts["verdict"]) == ("accept", "reject")
    assert [difference["field"] for difference in facts["differences"]] == ["inv_freq"]


def test_a_caught_lie_shows_which_check_failed() -> None:
    facts = shown(str(FOLDER / "lie_rotated_twice.kvpact"))
    assert facts["outcome"].startswith("failed: witness of layer")
    assert (facts["error"]["reason"], facts["error"]["check"]) == ("DATA_LOSS", "witness")


def test_bytes_that_were_changed_under_their_checksum_are_pointed_out(tmp_path: Path) -> None:
    capture = read_capture(FOLDER / "rotated_nhd16.kvpact")
    parts = tuple(
        replace(part, keys=bytes(len(part.keys)))
        if isinstance(part, Chunk) and part.header.sequence
        else part
        for part in capture.parts
    )
    write_capture(tmp_path / "changed.kvpact", replace(capture, parts=parts))
    assert [chunk["checksum_holds"] for chunk in shown(str(tmp_path / "changed.kvpact"))["chunks"]] == [
        True,
        False,
    ]
    result = CliRunner().invoke(app, ["handoff", "show", str(tmp_path / "changed.kvpact")])
    assert "doesn't hold" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", ["rotated_to_raw", "lie_axes_swapped", "window_leaves_blocks_out"])
def test_people_get_contract_verdict_costs_witnesses_and_chunks(name: str) -> None:
    result = CliRunner().invoke(app, ["handoff", "show", str(FOLDER / f"{name}.kvpact")])
    assert result.exit_code == 0, result.output
    for heading in ("contract of the writer", "verdict", "cost of", "witnesses", "chunks"):
        assert heading in result.stdout


def test_a_refused_pair_has_neither_terms_nor_costs(tmp_path: Path) -> None:
    capture = read_capture(FOLDER / "rotated_nhd16.kvpact")
    bare = replace(capture, reserved=None, parts=(), receipt=None)
    write_capture(tmp_path / "bare.kvpact", bare)
    facts = shown(str(tmp_path / "bare.kvpact"))
    assert (facts["terms"], facts["ledger"], facts["chunks"]) == (None, None, [])
    assert facts["outcome"] == "not reserved"
    assert CliRunner().invoke(app, ["handoff", "show", str(tmp_path / "bare.kvpact")]).exit_code == 0


@pytest.mark.parametrize("command", ["show", "replay"])
def test_a_folder_is_told_with_the_files_in_it(tmp_path: Path, command: str) -> None:
    (tmp_path / "decode-0").mkdir()
    result = CliRunner().invoke(app, ["handoff", command, str(tmp_path)])
    assert (result.exit_code, "is a folder; .kvpact files in it: none" in result.stderr) == (3, True)
    for name in "abcdefg":
        (tmp_path / "decode-0" / f"{name}.kvpact").touch()
    told = CliRunner().invoke(app, ["handoff", command, str(tmp_path)]).stderr
    assert f"{tmp_path}/decode-0/a.kvpact, " in told
    assert "e.kvpact and 2 more" in told


@pytest.mark.parametrize("content", [b"", b"GGUF rather", b"\x89KVPACT\n\x02\0\0\0"])
def test_a_file_of_another_kind_exits_3(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.kvpact").write_bytes(content)
    result = CliRunner().invoke(app, ["handoff", "show", str(tmp_path / "other.kvpact"), "--json"])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["reason"] == "UNREADABLE_SOURCE"


@pytest.mark.parametrize("contract", [b"", b"\xff\xff\xff"])
def test_a_damaged_contract_in_a_whole_file_exits_3(tmp_path: Path, contract: bytes) -> None:
    capture = read_capture(FOLDER / "rotated_nhd16.kvpact")
    offer = replace(capture.offer, contract=contract)
    write_capture(tmp_path / "damaged.kvpact", replace(capture, offer=offer))
    result = CliRunner().invoke(app, ["handoff", "show", str(tmp_path / "damaged.kvpact"), "--json"])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["source"].endswith("damaged.kvpact")


def test_an_unreadable_reader_exits_3() -> None:
    result = CliRunner().invoke(
        app, ["handoff", "show", str(FOLDER / "rotated_nhd16.kvpact"), "--reader", "/nowhere.json"]
    )
    assert result.exit_code == 3
