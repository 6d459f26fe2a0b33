"""One checkpoint from safetensors and from a lossless GGUF made from it is one model, and one contract."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvpact.cli.pair import InProcessPair
from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.identity_gguf import gguf_identity, state_rows
from kvpact.contract.identity_model import model_identity
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.gguf_config import gguf_config
from kvpact.contract.sources.gguf_file import open_gguf
from kvpact.contract.sources.huggingface import contract_from_config, read_config
from kvpact.engine.weights import resolve_model
from kvpact.types import Sampling, VerdictWord
from tests.fakes import VOCAB_SIZE, identified_engine, make_tiny_model, prompt_of
from tests.gguf_files import ARCHITECTURES, write_gguf
from tests.references import golden

torch.set_num_threads(1)
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 1024,
    "partial_rotary_factor": 0.75,
}
TIED = {"tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024} | THETA
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_gqa_6": {"model_type": "llama", "num_attention_heads": 6, "head_dim": 16, "hidden_size": 96},
    "llama_tied_llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama_biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_yarn": {"model_type": "llama", "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "rope_parameters": {"rope_type": "linear", "factor": 2.0} | THETA},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 32} | TIED,
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default"} | THETA,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 1024,
        "sliding_window": 99,
    },
    "stablelm": {
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25} | THETA,
    },
    "stablelm_parallel": {
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25} | THETA,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "kv_heads": 4,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25} | THETA,
    },
    "starcoder2": {"model_type": "starcoder2", "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_a_lossless_gguf_has_the_digests_and_the_contract_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", **MODELS[name])
    file = open_gguf(write_gguf(folder, tmp_path / "model.gguf"))
    config, stored = gguf_config(file), read_config(folder)
    identity = gguf_identity(file, config)
    assert identity == model_identity(folder, stored)
    assert None not in (identity.function_digest, identity.lm_head_digest, identity.tokenizer_digest)
    writer = contract_from_config(config, cache=CacheChoice(), identity=identity)
    reader = contract_from_config(stored, cache=CacheChoice(), identity=identity)
    verdict = compare(writer, reader, Policy(), pairing_reach(writer, reader))
    assert (verdict.word, [part.field for part in verdict.differences]) == (VerdictWord.ACCEPT, [])
    assert replace(writer, model=reader.model) == reader or "longrope" in name


def test_every_architecture_that_is_read_is_tried() -> None:
    assert {facts["model_type"] for facts in MODELS.values()} == set(ARCHITECTURES)


def _with_merges(folder: Path) -> Path:
    """The folder with a tokenizer that has a merge: readers of GGUF take one without for another kind."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["th"] = 259
    content["model"]["merges"] = [["t", "h"]]
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["llama", "llama_tied_llama3", "llama_yarn", "qwen3"])
async def test_a_handoff_between_an_engine_of_each_file_gives_the_tokens_of_one_model(
    name: str, tmp_path: Path
) -> None:
    folder = _with_merges(make_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE + 1, **MODELS[name]))
    converted = resolve_model(str(write_gguf(folder, tmp_path / "model.gguf")))
    prompts = [prompt_of(length) for length in (1, 17, 33)]
    engines = [identified_engine(source, blocks=64) for source in (folder, converted)]
    for engine in engines:
        engine.start()
    for writer, reader in (engines, engines[::-1]):
        async with InProcessPair(writer, reader) as pair:
            assert (await pair.connect()).word is VerdictWord.ACCEPT
            for prompt in prompts:
                sampling = Sampling(max_output_tokens=8, ignore_eos=True)
                tokens = [token.token_id async for token in pair.generate(prompt, sampling)]
                assert tuple(tokens) == golden(folder, prompt, 8).token_ids
    for engine in engines:
        engine.close()


def test_a_gguf_of_other_weights_is_another_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    other = make_tiny_model(tmp_path / "other", seed=1)
    file = open_gguf(write_gguf(other, tmp_path / "model.gguf"))
    found, expected = gguf_identity(file, gguf_config(file)), model_identity(folder, read_config(folder))
    assert found.function_digest != expected.function_digest
    assert found.lm_head_digest != expected.lm_head_digest
    assert found.tokenizer_digest == expected.tokenizer_digest


READ_BY_TRANSFORMERS = ["llama_gqa_6", "qwen2", "gemma2", "gemma3", "stablelm", "starcoder2"]


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_tensors_of_a_gguf_are_those_that_transformers_reads_from_it(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", **MODELS[name])
    path = write_gguf(folder, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    file = open_gguf(path)
    rows = dict(state_rows(file, gguf_config(file)))
    expected = read.state_dict()
    assert set(rows) | {"lm_head.weight"} == set(expected)
    for tensor, values in rows.items():
        assert np.array_equal(values, expected[tensor].numpy()), tensor
