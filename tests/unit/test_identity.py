"""Digests: equal for one function however it is stored, different for any other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvpact.contract.identity import IdentityDigests, contract_digest, function_digest, lm_head_digest
from kvpact.contract.identity_model import digest_rows, model_identity
from kvpact.contract.identity_rows import half_split_rows
from kvpact.contract.identity_tokenizer import tokenizer_digest, vocabulary_size
from kvpact.contract.jsonform import contract_from_json, contract_to_json
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.function_facts import FunctionFacts, function_facts
from kvpact.contract.sources.huggingface import contract_from_config, read_config
from kvpact.types import LaneOrder
from tests.factories import make_contract, make_group, with_model
from tests.fakes import make_tiny_model

torch.set_num_threads(1)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
GOLDEN_CONTRACT = "c54ea9f670d66b910a65ca8d7508857d7147ec2b700dbffcd45df56a4b73d8db"
GOLDEN_FUNCTION = "f27ddc288d4af6f6c9239a47b427206f9e33a6b9955b9e6d4337837a739c4066"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def _identity(folder: Path, **changes: Any) -> IdentityDigests:
    return model_identity(folder, read_config(folder) | changes)


def _copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


def _rewrite(folder: Path, change: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | change, file)


def _facts(folder: Path, size: int | None) -> FunctionFacts:
    config = read_config(folder)
    return function_facts(config, contract_from_config(config, cache=CacheChoice()), vocabulary_size=size)


def _state_rows(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        yield name, tensor.float().numpy()


def test_a_contract_digest_is_the_recorded_one() -> None:
    """A change here means that every pair of releases disagrees: it needs a new schema version."""
    contract = contract_from_config(CONFIG, cache=CacheChoice())
    assert contract_digest(contract).hex() == GOLDEN_CONTRACT


def test_a_contract_digest_doesnt_depend_on_field_order_or_grouping_or_names() -> None:
    contract = make_contract()
    digest = contract_digest(contract)

    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(value[key]) for key in reversed(value)}
        return [backwards(item) for item in value] if isinstance(value, list) else value

    assert contract_digest(contract_from_json(backwards(contract_to_json(contract)))) == digest
    split = make_contract(layer_groups=(make_group(layers=(1,)), make_group(layers=(0,))))
    assert contract_digest(split) == digest
    assert contract_digest(with_model(contract, name="x", revision="y", engine="z")) == digest
    assert contract_digest(with_model(contract, context_tokens=17)) != digest


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_contract_digest_is_the_same_in_another_process(seed: str) -> None:
    code = (
        "from kvpact.contract.identity import contract_digest\n"
        "from kvpact.contract.sources.cache_choice import CacheChoice\n"
        "from kvpact.contract.sources.huggingface import contract_from_config\n"
        f"print(contract_digest(contract_from_config({CONFIG!r}, cache=CacheChoice())).hex())\n"
    )
    env = os.environ | {"PYTHONHASHSEED": seed}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == GOLDEN_CONTRACT


def test_a_function_digest_is_the_recorded_one() -> None:
    rows = [("b", np.arange(6, dtype=np.float32).reshape(2, 3)), ("a", np.ones(4, np.float32))]
    digest = function_digest(rows, {"architecture": "llama"})
    assert digest.hex() == GOLDEN_FUNCTION
    assert function_digest(reversed(rows), {"architecture": "llama"}) == digest
    assert function_digest(rows, {"architecture": "qwen3"}) != digest
    assert function_digest([("a", rows[0][1]), ("b", rows[1][1])], {"architecture": "llama"}) != digest
    assert function_digest([("b", rows[0][1].reshape(3, 2)), rows[1]], {"architecture": "llama"}) != digest


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_and_the_loaded_model_have_one_digest(tmp_path: Path, model_type: str, tied: bool) -> None:
    folder = make_tiny_model(
        tmp_path / "m", model_type=model_type, tie_word_embeddings=tied, attention_bias=True
    )
    facts = _facts(folder, vocabulary_size(folder))
    loaded = digest_rows(_state_rows(folder), facts)
    stored = _identity(folder)
    assert (loaded.function_digest, loaded.lm_head_digest) == (stored.function_digest, stored.lm_head_digest)
    assert stored.tokenizer_digest == tokenizer_digest(folder / "tokenizer.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_type_doesnt_matter_only_the_values(folder: Path, dtype: torch.dtype) -> None:
    values = load_file(folder / "model.safetensors")
    narrow = torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
    rounded = _copy(folder, "rounded")
    _rewrite(rounded, {name: tensor.to(narrow).float() for name, tensor in values.items()})
    stored = _copy(folder, "stored")
    _rewrite(stored, {name: tensor.to(narrow).to(dtype) for name, tensor in values.items()})
    assert _identity(stored) == _identity(rounded)
    assert _identity(stored) != _identity(folder)


def test_shards_and_a_base_model_s_names_dont_matter(folder: Path) -> None:
    sharded = _copy(folder, "sharded")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    (sharded / "model.safetensors").unlink()
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert _identity(sharded) == _identity(folder)
    base = _copy(folder, "base")
    values = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): v for name, v in values.items()}, base / "model.safetensors")
    assert _identity(base) == _identity(folder)


def test_one_flipped_bit_in_any_weight_changes_the_digest(folder: Path) -> None:
    values = load_file(folder / "model.safetensors")
    before = _identity(folder)
    for name, tensor in values.items():
        other = _copy(folder, "flipped")
        flipped = tensor.clone()
        flipped.view(torch.int32).flatten()[0] ^= 1
        _rewrite(other, {name: flipped})
        after = _identity(other)
        changed = "lm_head_digest" if name == "lm_head.weight" else "function_digest"
        assert getattr(after, changed) != getattr(before, changed), name
        kept = "function_digest" if name == "lm_head.weight" else "lm_head_digest"
        assert getattr(after, kept) == getattr(before, kept), name
        shutil.rmtree(other)


def test_buffers_and_tensors_that_the_model_doesnt_have_are_left_out(folder: Path) -> None:
    other = _copy(folder, "other")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.9.mlp.x": torch.ones(2),
    }
    _rewrite(other, extra)
    assert _identity(other) == _identity(folder)


def test_embedding_rows_beyond_the_tokenizer_dont_matter(folder: Path) -> None:
    assert vocabulary_size(folder) == 259
    values = load_file(folder / "model.safetensors")
    padded, changed = _copy(folder, "padded"), _copy(folder, "changed")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    _rewrite(padded, {name: torch.cat([values[name], torch.ones(8, 64)]) for name in names})
    assert _identity(padded) == _identity(folder)
    last = values[names[0]].clone()
    last[258] += 1
    _rewrite(changed, {names[0]: last})
    assert _identity(changed).function_digest != _identity(folder).function_digest


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][:259].numpy()
    assert _identity(folder, tie_word_embeddings=True).lm_head_digest == lm_head_digest(rows)
    assert _identity(folder).lm_head_digest != lm_head_digest(rows)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"max_position_embeddings": 128},
        {"num_key_value_heads": 4},
        {"torch_dtype": "bfloat16"},
        {"hidden_act": "swish"},
        {"rms_norm_eps": 1.0000000001e-06},
        {"mlp_bias": False},
    ],
)
def test_facts_with_a_contract_field_or_without_effect_keep_the_digest(
    folder: Path, change: dict[str, Any]
) -> None:
    assert _identity(folder, **change) == _identity(folder)


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}])
def test_facts_that_change_the_function_change_the_digest(folder: Path, change: dict[str, Any]) -> None:
    assert _identity(folder, **change).function_digest != _identity(folder).function_digest


def test_adjacent_rows_have_the_digest_of_the_half_split_model(folder: Path) -> None:
    facts = _facts(folder, 259)
    rows = dict(_state_rows(folder))

    def to_adjacent(values: np.ndarray) -> np.ndarray:
        heads = values.reshape(-1, 2, 8, *values.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)

    adjacent = {n: to_adjacent(v) if "q_proj" in n or "k_proj" in n else v for n, v in rows.items()}
    name = "model.layers.0.self_attn.k_proj.weight"
    assert np.array_equal(half_split_rows(adjacent[name], 16), rows[name])
    expected = digest_rows(rows.items(), facts)
    assert digest_rows(adjacent.items(), replace(facts, weight_lane_order=LaneOrder.ADJACENT)) == expected
    assert digest_rows(adjacent.items(), facts) != expected
