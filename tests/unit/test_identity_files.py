"""Digests of model folders: files that can't be read, and what is kept between runs."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpact.contract import identity_model
from kvpact.contract.cache_folder import cache_folder
from kvpact.contract.identity import IdentityDigests
from kvpact.contract.identity_model import model_identity
from kvpact.contract.identity_tokenizer import tokenizer_digest
from kvpact.contract.sources.huggingface import read_config
from kvpact.errors import UnreadableSource
from tests.fakes import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def _identity(folder: Path, **changes: Any) -> IdentityDigests:
    return model_identity(folder, read_config(folder) | changes)


def _rewrite(folder: Path, change: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | change, file)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    values = load_file(folder / "model.safetensors")
    del values["model.layers.1.mlp.up_proj.weight"]
    save_file(values, folder / "model.safetensors")
    with pytest.raises(UnreadableSource, match=r"weights lack model\.layers\.1\.mlp\.up_proj\.weight"):
        _identity(folder)


def test_a_folder_without_weights_has_no_function_digest(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    found = _identity(folder)
    assert (found.function_digest, found.lm_head_digest) == (None, None)
    assert found.tokenizer_digest is not None
    (folder / "tokenizer.json").unlink()
    assert _identity(folder) == IdentityDigests()


def test_pickled_or_quantised_weights_are_refused(folder: Path) -> None:
    with pytest.raises(UnreadableSource, match="quantization_config"):
        _identity(folder, quantization_config={"quant_method": "fp8"})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnreadableSource, match=r"pickled weights only \(pytorch_model\.bin\)"):
        _identity(folder)


def _header(entry: dict[str, Any]) -> bytes:
    text = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header runs past its end"),
        (struct.pack("<Q", 1 << 40) + b"{}", "header runs past its end"),
        (struct.pack("<Q", 2) + b"[]", "header is no object"),
        (struct.pack("<Q", 2) + b"{x", "isn't safetensors"),
        (_header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}) + b"123", "outside 3 bytes"),
        (_header({"dtype": "F32", "shape": [4], "data_offsets": [-4, 16]}) + b"1" * 16, "outside 16 bytes"),
        (_header({"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}) + b"1" * 16, "can't be read"),
        (_header({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}) + b"1" * 16, "can't be read"),
        (_header({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}) + b"1234", "stored as F8_E4M3"),
        (_header({"dtype": "F32", "shape": [4]}) + b"1" * 16, "can't be read"),
        (_header({"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}) + b"1" * 16, "can't be read"),
    ],
)
def test_a_broken_weight_file_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableSource, match=message):
        _identity(folder)


def test_an_index_cant_name_files_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableSource, match=r"secret\.safetensors, which isn't in the folder"):
        _identity(folder)


def test_digests_are_kept_until_the_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _identity(folder)
    monkeypatch.setattr(identity_model, "read_rows", lambda _: pytest.fail("weights were read again"))
    assert _identity(folder) == first
    assert _identity(folder, rms_norm_eps=1e-5).function_digest != first.function_digest
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    stat = (folder / "model.safetensors").stat()
    values = load_file(folder / "model.safetensors")
    _rewrite(folder, {"model.norm.weight": values["model.norm.weight"] + 1})
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert _identity(folder).function_digest != first.function_digest


def test_other_weights_under_the_same_path_size_and_time_are_seen(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before, stat = _identity(folder), weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x01
    weights.write_bytes(bytes(data))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert _identity(folder) != before


@pytest.mark.parametrize("damage", [b"", b"{", b'{"digests": {}, "check": ""}', b"[]", b"\xff", "swap"])
def test_a_damaged_cache_entry_is_computed_again(folder: Path, damage: bytes | str) -> None:
    first = _identity(folder)
    (entry,) = cache_folder("identity").glob("*.json")
    kept = json.loads(entry.read_text())
    if isinstance(damage, str):
        kept["digests"]["model.norm.weight"] = "0" * 64
        entry.write_text(json.dumps(kept))
    else:
        entry.write_bytes(damage)
    assert _identity(folder) == first
    assert json.loads(entry.read_text())["check"] == kept["check"]


def test_a_cache_folder_that_cant_be_written_is_only_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "file"))
    assert _identity(folder).function_digest is not None
    assert "can't keep weight digests" in caplog.text


def test_a_tokenizer_s_digest_is_that_of_its_content(folder: Path) -> None:
    file = folder / "tokenizer.json"
    digest = tokenizer_digest(folder)
    content = json.loads(file.read_text())
    content["model"]["merges"] = [["a", "b"]]
    merged = json.dumps(content)
    file.write_text(json.dumps(dict(reversed(content.items())) | {"padding": {"length": 3}}))
    pairs = tokenizer_digest(folder)
    content["model"]["merges"] = ["a b"]
    file.write_text(json.dumps(content, indent=4))
    assert tokenizer_digest(folder) == pairs
    assert pairs != digest
    file.write_text(merged.replace('"<|im_end|>"', '"<|end|>"'))
    assert tokenizer_digest(folder) not in (digest, pairs)
    file.write_text("{")
    with pytest.raises(UnreadableSource, match=r"tokenizer\.json"):
        tokenizer_digest(folder)
