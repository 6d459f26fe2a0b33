"""What commands say of wrong input: flag, side, value, what was expected; all before anything is started."""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvpact.cli.check_remedies import with_check_flags
from kvpact.cli.main import app
from kvpact.contract.compare import Policy, compare
from kvpact.contract.findings import REMEDIES
from kvpact.types import Difference, DifferenceAction, Relation
from tests.factories import make_contract

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a model until its weights are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def refused(*arguments: str, code: int = 2) -> str:
    done = run(*arguments)
    assert done.exit_code == code, done.output + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--decode-cache", "blocksize=3"), "--decode-cache: cache key blocksize is unknown; did you mean"),
        (("--prefill-cache", "block_size=0"), "--prefill-cache: cache key block_size: found 0, expected"),
        (("--decode-override", "rope_thta=1"), "--decode-override .* did you mean rope_theta"),
        (("--decode-override", "rope_theta=abc"), "--decode-override .* rope_theta: found 'abc', expected"),
        (
            ("--prefill-override", "num_key_value_heads=3"),
            "--prefill-override .* found 3, expected a divisor",
        ),
        (("--max-model-len", "999"), "--max-model-len .* found 999, expected 1 to .* 128"),
        (("--host", "nosuch.invalid"), "--host .*nosuch.invalid is no address of this machine"),
        (("--host", "0.0.0.0"), "--host .*0.0.0.0.*api_keys is empty"),
    ],
)
def test_up_refuses_wrong_values_before_ray_starts(model: str, flags: tuple[str, ...], says: str) -> None:
    assert re.search(says, refused("up", "--model", model, "--port", "0", *flags))


def test_up_refuses_a_folder_for_captures_that_can_t_be(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, why in (("/proc/x", ""), (f"{tmp_path}/file", "it is no folder"), (f"{tmp_path}/file/x", "")):
        told = refused("up", "--model", model, "--port", "0", "--capture", folder)
        assert f"--capture (handoff.capture): can't write to {folder}: {why}" in told
    assert "ray" in refused("up", "--model", model, "--port", "0", "--capture", f"{tmp_path}/new", code=1)


def test_a_config_file_that_is_absent_is_named_once() -> None:
    told = refused("up", "--config", "nofile.yaml")
    assert told.strip() == "error can't read config file nofile.yaml: No such file or directory"


def test_up_refuses_a_port_that_is_taken(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in refused("up", "--model", model, "--port", str(port), code=1)


def test_a_missing_package_is_one_line(model: str) -> None:
    told = refused("up", "--model", model, "--port", "0", code=1)
    assert told.splitlines()[-1].startswith("error this command needs the package ray")


def test_parity_refuses_lengths_beyond_the_context(model: str) -> None:
    assert "--lengths: 127 and 2 more tokens exceed the context of 128" in refused(
        "parity", model, "--lengths", "1,127"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "prefill: {workers: 2}",
            "prefill.workers is unknown; did you mean prefill_workers at the top level?",
        ),
        ("decode: {block_size: 3}", "did you mean decode.cache.block_size?"),
    ],
)
def test_a_wrong_config_file_is_named_with_the_right_path(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    told = refused("up", "--config", str(file))
    assert str(file) in told
    assert says in told


def test_contract_check_says_what_it_expected(model: str, tmp_path: Path) -> None:
    text = tmp_path / "notes.md"
    text.write_text("# hello")
    config = f"{model}/config.json"
    told = refused("contract", "check", config, str(tmp_path), code=3)
    assert f"{tmp_path} isn't a model folder: no config.json in it" in told
    told = refused("contract", "check", str(text), config, code=3)
    assert "expected a contract file, a config.json, a GGUF file or a model folder" in told


def test_remedies_of_contract_check_name_its_own_flags() -> None:
    differences = tuple(
        Difference(
            field=field,
            layers=(),
            writer="a",
            reader="b",
            relation=Relation.INCOMPATIBLE,
            action=DifferenceAction.REJECT,
            explanation="",
            remedy=remedy,
        )
        for field, remedy in REMEDIES.items()
    )
    contract = make_contract()
    verdict = replace(compare(contract, contract, Policy(), 16), differences=differences)
    text = " ".join(each.remedy for each in with_check_flags(verdict).differences)
    assert "--writer-set cache.block_size=..." in text
    assert not re.search(r"--(prefill|decode)-|--model\b|(prefill|decode)\.(cache|override)", text)


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"kvpact \d+\.\d+.*\n", run("--version").stdout)


def test_help_of_up_shows_defaults() -> None:
    text = run("up", "--help").stdout
    for default in ("Default: 8000", "Default: 1", "Default: 127.0.0.1", "Default: smollm2"):
        assert default in text
