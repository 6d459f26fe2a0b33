"""Settings: flags over environment over file over defaults, and errors that name the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.config import Config, load_config, parse_config
from kvpact.errors import BadRequest
from kvpact.types import KeyState


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvpact.yaml"
    path.write_text("prefill:\n  port: 7001\n  cache: {key_state: raw, block_size: 32}\napi: {port: 9000}\n")
    return path


def test_nothing_set_gives_the_defaults() -> None:
    assert load_config(None, {}) == Config()


def test_flags_win_over_environment_over_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACT_PREFILL__PORT", "7002")
    monkeypatch.setenv("KVPACT_API__PORT", "9001")
    config = load_config(file, {"api": {"port": 9002}})
    assert (config.prefill.port, config.api.port) == (7002, 9002)
    assert config.prefill.cache.key_state is KeyState.RAW
    assert config.prefill.cache.block_size == 32


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "kvpact.yaml"
    path.write_text("prefill: {cache: {blok_size: 8}}\n")
    with pytest.raises(BadRequest, match=r"prefill\.cache\.blok_size is unknown; did you mean block_size\?"):
        load_config(path, {})


def test_an_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACT_MODLE", "x")
    with pytest.raises(BadRequest, match="KVPACT_MODLE names no config key; did you mean KVPACT_MODEL"):
        load_config(None, {})


def test_a_wrong_value_says_what_was_found() -> None:
    with pytest.raises(BadRequest, match=r"config key api\.port: found 99999"):
        load_config(None, {"api": {"port": 99999}})


@pytest.mark.parametrize("text", ["- a\n- b\n", "{", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvpact.yaml"
    path.write_text(text)
    with pytest.raises(BadRequest, match=r"kvpact\.yaml"):
        load_config(path, {})


def test_an_empty_key_is_refused_and_the_end_of_a_line_is_no_part_of_one() -> None:
    for name in ("api_keys", "admin_keys"):
        with pytest.raises(BadRequest, match=f"api.{name}.1: found what isn't shown, "):
            parse_config({"api": {name: ["a", " "]}})
    assert parse_config({"api": {"api_keys": ["a\n"]}}).api.api_keys == ("a",)


def test_no_message_shows_a_key_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"config key api\.admin_keys: ") as refused:
        parse_config({"api": {"admin_keys": "secret"}})
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("KVPACT_API__API_KEYS", "secret")
    with pytest.raises(BadRequest, match=r"are written as JSON, such as KVPACT_API__API_KEYS=") as refused:
        load_config(None, {})
    assert "secret" not in str(refused.value)
