"""Failures measured with servers that answered HTTP 200 and were wrong: one command refuses each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvpact.cli.contract import app
from tests.fakes import make_tiny_model

LONGROPE = {
    "model_type": "phi3",
    "original_max_position_embeddings": 2048,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0],
        "original_max_position_embeddings": 2048,
        "partial_rotary_factor": 1.0,
    },
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _check(*arguments: str | Path) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments), "--json"])
    return result, json.loads(result.stdout)


def _rejected(verdict: dict[str, Any]) -> set[str]:
    return {part["field"] for part in verdict["differences"] if part["action"] == "reject"}


def test_a_theta_override_on_the_decode_side_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", theta=100000.0)
    result, verdict = _check(folder, folder, "--reader-set", "rope_theta=10000")
    assert (result.exit_code, verdict["verdict"], verdict["identity"]) == (20, "reject", "equal")
    assert [part["field"] for part in verdict["differences"]] == ["inv_freq"]
    control, _ = _check(folder, folder, "--reader-set", "rope_theta=100000")
    assert control.exit_code == 0


def test_other_weights_behind_one_name_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a" / "model")
    other = make_tiny_model(tmp_path / "b" / "model", seed=1)
    result, verdict = _check(folder, other)
    assert (result.exit_code, verdict["verdict"], verdict["identity"]) == (20, "reject", "different")
    assert _rejected(verdict) == {"function_digest", "lm_head_digest"}
    copy = shutil.copytree(folder, tmp_path / "c" / "model")
    control, verdict = _check(folder, copy)
    assert (control.exit_code, verdict["identity"]) == (0, "equal")


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
def test_one_longrope_folder_served_for_another_length_is_refused(tmp_path: Path, server: str) -> None:
    folder = make_tiny_model(tmp_path / "model", **LONGROPE)
    short = ("--reader-set", "max_model_len=2048")
    result, verdict = _check(folder, folder, "--served-by", server, *short)
    assert (result.exit_code, verdict["verdict"], verdict["identity"]) == (20, "reject", "equal")
    assert _rejected(verdict) == {"inv_freq"}
    for control in (("--reader-set", "max_model_len=4096"), ("--reader-set", "max_model_len=2049")):
        result, _ = _check(folder, folder, "--served-by", server, *control)
        assert result.exit_code == 0
    result, _ = _check(folder, folder, "--served-by", server, *short, "--writer-set", "max_model_len=2048")
    assert result.exit_code == 0


def test_a_server_that_changes_tables_on_the_way_is_refused_past_the_switch(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", **LONGROPE)
    result, verdict = _check(folder, folder, "--writer-served-by", "transformers")
    assert (result.exit_code, _rejected(verdict)) == (20, {"frequency_policy"})
    result, _ = _check(
        folder, folder, "--writer-served-by", "transformers", "--writer-set", "max_model_len=2048"
    )
    assert result.exit_code == 0


def test_raw_keys_dont_make_tables_negotiable(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    raw = ("--writer-set", "cache.key_state=raw", "--reader-set", "cache.key_state=raw")
    result, verdict = _check(folder, folder, *raw, "--reader-set", "rope_theta=500000")
    assert (result.exit_code, verdict["verdict"], _rejected(verdict)) == (20, "reject", {"inv_freq"})
    control, _ = _check(folder, folder, *raw)
    assert control.exit_code == 0
