"""`kvpact contract show` and `check`: exit codes, JSON, and text for people."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvpact.cli.contract import app
from kvpact.cli.contract_tables import layer_ranges
from kvpact.contract.jsonform import contract_from_json, contract_to_json
from tests.factories import make_contract
from tests.fakes import make_tiny_model
from tests.gguf_files import write_gguf
from tests.handoff_fakes import grpc_wire

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_show_prints_a_file_that_is_a_contract(config: str, tmp_path: Path) -> None:
    shown = _run("show", config, "--json")
    assert shown.exit_code == 0, shown.output
    assert "cache: default" in shown.stderr
    contract = contract_from_json(json.loads(shown.stdout))
    assert contract_to_json(contract) == json.loads(shown.stdout)
    file = tmp_path / "contract.json"
    file.write_text(shown.stdout)
    again = _run("show", str(file), "--json")
    assert again.stdout == shown.stdout
    assert "cache: file" in again.stderr
    assert _run("check", str(file), config).exit_code == 0


def test_show_for_people_names_every_part(config: str) -> None:
    shown = _run("show", config, "--set", "cache.key_state=raw")
    assert shown.exit_code == 0
    for text in (
        "cache: set",
        "llama",
        "unknown",
        "layers 0-1",
        "raw",
        "half_split",
        "inv_freq",
        "4096 tokens",
    ):
        assert text in shown.stdout


def test_show_of_a_folder_has_its_digests(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", model_type="qwen3")
    values = json.loads(_run("show", str(folder), "--json").stdout)
    assert all(values[name] for name in ("function_digest", "lm_head_digest", "tokenizer_digest"))
    check = _run("check", str(folder), str(folder / "config.json"), "--json")
    assert json.loads(check.stdout)["identity"] == "not_compared"
    both = _run("check", str(folder), str(folder), "--json")
    assert json.loads(both.stdout) == {
        "verdict": "accept",
        "identity": "equal",
        "differences": [],
        "plan": [],
    }


def test_other_weights_are_rejected_and_named(tmp_path: Path) -> None:
    one, other = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "other", seed=1)
    check = _run("check", str(one), str(other), "--json")
    assert check.exit_code == 20
    verdict = json.loads(check.stdout)
    assert (verdict["verdict"], verdict["identity"]) == ("reject", "different")
    assert {part["field"] for part in verdict["differences"]} == {"function_digest", "lm_head_digest"}


def test_another_theta_exits_20_with_exactly_one_difference(config: str) -> None:
    check = _run("check", config, config, "--reader-set", "rope_theta=10000", "--json")
    assert check.exit_code == 20
    verdict = json.loads(check.stdout)
    assert verdict["verdict"] == "reject"
    (difference,) = verdict["differences"]
    assert (difference["field"], difference["layers"]) == ("inv_freq", [0, 1])
    keys = {"field", "layers", "writer", "reader", "relation", "action", "remedy", "explanation"}
    assert set(difference) == keys
    assert all(difference[key] for key in keys)
    assert set(verdict) == {"verdict", "identity", "differences", "plan"}


@pytest.mark.parametrize(
    "flag",
    [
        ("--config", "x.yaml"),
        ("--model", "x"),
        ("--role", "decode"),
        ("--wait", "1"),
        ("--termination-log", "x"),
        ("--admin-key-file", "x"),
    ],
)
def test_what_only_a_cluster_is_asked_is_refused_without_one(config: str, flag: tuple[str, str]) -> None:
    check = _run("check", config, config, *flag)
    assert check.exit_code == 2
    assert f"{flag[0]} needs --against-cluster" in check.stderr
    assert _run("check", config, config).exit_code == 0


@pytest.mark.parametrize(
    ("flag", "named"),
    [(("x",), "WRITER"), (("--writer-set", "a=1"), "--writer-set"), (("--tls", "."), "--tls")],
)
def test_what_no_cluster_is_asked_is_refused_beside_one(flag: tuple[str, ...], named: str) -> None:
    check = _run("check", *flag, "--against-cluster", "http://127.0.0.1:9", "--role", "decode")
    assert check.exit_code == 2
    assert f"{named} doesn't count with --against-cluster" in check.stderr


def test_a_cluster_that_is_away_is_named_by_its_flag(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "model"))
    words = ("check", "--role", "decode", "--model", folder, "--require", "accept", "--against-cluster")
    away = _run(*words, "http://127.0.0.1:9")
    assert away.exit_code == 1
    assert "no coordinator answers at http://127.0.0.1:9" in away.stderr
    assert "see --against-cluster" in away.stderr
    assert "--against-cluster: 'nowhere' is no server" in _run(*words, "nowhere").stderr


def test_what_is_set_over_a_source_is_told_beside_it(config: str) -> None:
    check = _run(
        "check", config, config, "--reader-set", "rope_theta=10000", "--writer-set", "cache.block_size=8"
    )
    assert f"reader {config} with rope_theta=10000: cache: default" in check.stdout
    assert f"writer {config} with cache.block_size=8: cache: set" in check.stdout
    assert f"writer {config}: cache: default" in _run("check", config, config).stdout


def test_a_conversion_exits_0_or_10_when_accept_is_required(config: str) -> None:
    arguments = (
        "check",
        config,
        config,
        "--writer-set",
        "cache.key_state=raw",
        "--reader-set",
        "cache.block_size=24",
    )
    usable, required = _run(*arguments), _run(*arguments, "--require", "accept", "--json")
    assert (usable.exit_code, required.exit_code) == (0, 10)
    assert usable.stdout.count("convert") >= 1
    assert "holds only if both sides are one model" in usable.stdout
    verdict = json.loads(required.stdout)
    assert verdict["verdict"] == "convert"
    assert {part["field"] for part in verdict["differences"]} == {"key_state", "block_size"}
    assert [set(step) for step in verdict["plan"]] == [{"op", "exactness"}] * len(verdict["plan"])
    assert _run("check", config, config, "--require", "accept").exit_code == 0


def test_the_verdict_word_is_always_printed(config: str) -> None:
    assert "accept" in _run("check", config, config).stdout
    rejected = _run("check", config, config, "--reader-set", "rope_theta=10000")
    assert "reject" in rejected.stdout
    for text in ("inv_freq", "0-1", "remedy", "rad"):
        assert text in rejected.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.json", None, "no such file or folder"),
        ("empty", "folder", "config.json"),
        ("x.json", b"{", "isn't JSON"),
        ("x.json", b"\xff\xfe", "can't read"),
        ("x.json", b"[]", "no JSON object"),
        ("x.json", b"{}", "model_type"),
        ("x.json", b'{"model_type": "foo"}', "'foo' isn't known"),
        ("x.json", b'{"model_type": "llama", "rope_theta": 0}', "rope_theta"),
        ("x.json", b'{"model_type": "llama", "rope_theta": NaN}', "rope_theta"),
        ("x.json", b'{"layers": []}', "absent"),
        ("model.gguf", b"GGUF....", "GGUF"),
        ("model", b"GGUF....", "GGUF"),
    ],
)
def test_a_side_that_cant_be_read_exits_3(
    config: str, tmp_path: Path, name: str, content: bytes | str | None, message: str
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    for arguments in (("show", str(path)), ("check", config, str(path)), ("check", str(path), config)):
        result = _run(*arguments)
        assert result.exit_code == 3, result.output
        assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no-such-host.invalid:80"])
def test_a_worker_that_doesnt_answer_exits_3_and_says_what_to_do(config: str, address: str) -> None:
    result = _run("check", config, address)
    said = result.stderr.replace("\n", " ")
    assert result.exit_code == 3, result.output
    assert f"no worker answers at {address}" in said
    assert "give the address that `kvpact up`" in said


async def test_a_running_worker_is_asked_for_its_contract(config: str) -> None:
    async with grpc_wire() as wire:
        address = wire.port.endpoint
        shown, checked, refused = [
            await _in_a_process(*arguments)
            for arguments in (
                ("show", address, "--json"),
                ("check", address, config, "--json"),
                ("show", address, "--set", "rope_theta=1"),
            )
        ]
    assert contract_from_json(json.loads(shown[1])) == wire.reader.contract
    assert "cache: worker" in shown[2]
    assert (checked[0], json.loads(checked[1])["verdict"]) == (20, "reject")
    assert (refused[0], "a running worker" in refused[2]) == (2, True)


async def _in_a_process(*arguments: str) -> tuple[int | None, str, str]:
    """The command in a process of its own, beside the event loop that serves it: code, stdout, stderr."""
    command = (sys.executable, "-c", "from kvpact.cli.contract import app; app()", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode().replace("\n", " ")


def test_a_server_whose_rules_arent_known_is_wrong_usage(config: str) -> None:
    for arguments in (
        ("show", config, "--served-by", "sglang"),
        ("check", config, config, "--served-by", "sglang"),
        ("check", config, config, "--reader-served-by", "sglang"),
    ):
        result = _run(*arguments)
        assert result.exit_code == 2
        assert "expected transformers, vllm, llama.cpp" in result.stderr.replace("\n", " ")


def test_one_table_is_the_same_whoever_serves_it(config: str) -> None:
    plain = json.loads(_run("show", config, "--json").stdout)
    assert json.loads(_run("show", config, "--json", "--served-by", "vllm").stdout) == plain
    assert _run("check", config, config, "--writer-served-by", "llama.cpp").exit_code == 0


def test_a_gguf_file_is_shown_and_checked_against_its_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", theta=100000.0)
    gguf = str(write_gguf(folder, tmp_path / "model.gguf", logit_scale=2.0))
    shown = _run("show", gguf, "--json")
    assert (shown.exit_code, "llama.logit_scale isn't known" in shown.stderr) == (0, True)
    both = _run("check", gguf, str(folder), "--json")
    assert json.loads(both.stdout)["verdict"] == "accept"
    other = _run("check", gguf, str(folder), "--writer-set", "rope_theta=10000", "--json")
    assert [part["field"] for part in json.loads(other.stdout)["differences"]] == ["inv_freq"]


def test_costs_are_those_of_the_contract_s_ledger(config: str) -> None:
    costs = json.loads(_run("show", config, "--cost", "100", "--json").stdout)
    assert (costs["tokens"], costs["cache_bytes"]) == (100, 2 * 2 * 2 * 16 * 100 * 4)
    narrow = _run("show", config, "--cost", "100", "--json", "--set", "cache.dtype=bfloat16")
    assert json.loads(narrow.stdout)["cache_bytes"] == costs["cache_bytes"] // 2
    assert "51,200 bytes" in _run("show", config, "--cost", "100").stdout
    assert _run("show", config, "--cost", "0").exit_code == 2


def test_a_contract_file_with_an_unset_field_exits_3_and_names_it(config: str, tmp_path: Path) -> None:
    values = contract_to_json(make_contract())
    values["layers"][0]["rotary"]["key_state"] = None
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(values))
    result = _run("check", str(file), config)
    assert (result.exit_code, "layers[0].rotary.key_state" in result.stderr) == (3, True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rope_theta", "key=value"),
        ("=1", "key=value"),
        ("rope_thta=1", "did you mean rope_theta"),
        ("cache.keystate=raw", "did you mean key_state"),
        ("cache.key_state=none", "raw or rotated"),
        ("max_model_len=0", "at least 1"),
        ("max_model_len=8192", "max_position_embeddings = 4096"),
    ],
)
def test_a_wrong_setting_exits_2(config: str, setting: str, message: str) -> None:
    for arguments in (("show", config, "--set", setting), ("check", config, config, "--reader-set", setting)):
        result = _run(*arguments)
        assert (result.exit_code, message in result.stderr.replace("\n", " ")) == (2, True), result.output


def test_wrong_usage_exits_2(config: str, tmp_path: Path) -> None:
    assert _run("check", config).exit_code == 2
    assert _run("check", config, config, "--require", "perfection").exit_code == 2
    twice = ("--set", "rope_theta=1e4", "--set", "rope_theta=2e4")
    assert _run("show", config, *twice).exit_code == 2
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(contract_to_json(make_contract())))
    assert _run("show", str(file), "--set", "rope_theta=1e4").exit_code == 2


def test_keys_that_nothing_reads_and_stale_digests_are_warned_of(config: str, tmp_path: Path) -> None:
    Path(config).write_text(json.dumps(CONFIG | {"logit_scale": 2.0}))
    result = _run("show", config, "--json")
    assert (result.exit_code, "logit_scale" in result.stderr) == (0, True)
    values = contract_to_json(make_contract()) | {"digest": "0" * 64}
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(values))
    assert "digest isn't that of the fields" in _run("show", str(file)).stderr


def test_max_model_len_is_the_context(config: str) -> None:
    shown = _run("show", config, "--json", "--set", "max_model_len=128")
    assert json.loads(shown.stdout)["context_tokens"] == 128


def test_layer_ranges_are_short() -> None:
    assert layer_ranges(()) == "all"
    assert layer_ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_a_gguf_is_read_without_torch(tmp_path: Path) -> None:
    gguf = str(write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "model.gguf"))
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'grpc'):\n"
        "    sys.modules[name] = None\n"
        "from kvpact.cli.contract import app\n"
        f"app(['show', {gguf!r}, '--json'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, json.loads(result.stdout)["architecture"]) == (0, "llama"), result.stderr


def test_check_needs_neither_torch_nor_transformers_nor_ray(config: str) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'grpc'):\n"
        "    sys.modules[name] = None\n"
        "from kvpact.cli.contract import app\n"
        f"app(['check', {config!r}, {config!r}, '--json'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, json.loads(result.stdout)["verdict"]) == (0, "accept"), result.stderr
