"""Configs and GGUF files with anything in them: a contract comes out, or one of two errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from kvpact.contract.identity_gguf import gguf_facts
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import family_of
from kvpact.contract.sources.function_facts import function_facts, has_function_rule
from kvpact.contract.sources.gguf_config import gguf_config, unread_metadata
from kvpact.contract.sources.gguf_file import open_gguf
from kvpact.contract.sources.gguf_tokens import gguf_vocabulary
from kvpact.contract.sources.huggingface import contract_from_config, read_config, unread_keys
from kvpact.errors import BadRequest, UnreadableSource

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "intermediate_size": 96,
}  # fmt: skip
LLAMA = SIZES | {
    "model_type": "llama", "rope_theta": 5e5, "head_dim": 16, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip
GEMMA3 = SIZES | {
    "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 10_000, 10_001, 65_536, 65_538, 2**31 - 1, 2**31, 10**30, 10**400,
    0.0, -0.5, 0.5, 1e308, 1e-308, 5e-324, 3e38, 1e-37, float("nan"), float("inf"), "", "x", "LLG", "yarn",
    "dynamic", "longrope", "proportional", "linear", [], [1], [None], [[1]], ["x"] * 4, {}, {"a": 1},
    {"full_attention": 1}, {"rope_type": []}, {"factor": 1e308},
)  # fmt: skip
GGUF_ODD: tuple[tuple[GGUFValueType, Any], ...] = (
    (GGUFValueType.STRING, ""), (GGUFValueType.STRING, "yarn"), (GGUFValueType.STRING, "linear"),
    (GGUFValueType.BOOL, True), (GGUFValueType.UINT8, 0), (GGUFValueType.INT32, -1),
    (GGUFValueType.UINT32, 3), (GGUFValueType.UINT32, 2**32 - 1), (GGUFValueType.UINT64, 2**64 - 1),
    (GGUFValueType.FLOAT32, 0.0), (GGUFValueType.FLOAT32, -1.0), (GGUFValueType.FLOAT32, 1e-45),
    (GGUFValueType.FLOAT32, float("nan")), (GGUFValueType.FLOAT32, float("inf")),
    (GGUFValueType.FLOAT64, 1e300), (GGUFValueType.FLOAT64, 5e-324), (GGUFValueType.ARRAY, [1, 2]),
    (GGUFValueType.ARRAY, [1.5]), (GGUFValueType.ARRAY, ["a", "b"]), (GGUFValueType.ARRAY, [True]),
    (GGUFValueType.ARRAY, [[1], [2]]),
)  # fmt: skip
GGUF_FACTS: dict[str, Any] = {
    "gemma3.context_length": 4096, "gemma3.embedding_length": 64, "gemma3.block_count": 2,
    "gemma3.feed_forward_length": 96, "gemma3.attention.head_count": 4, "gemma3.attention.head_count_kv": 2,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-5, "gemma3.rope.freq_base": 1e6,
    "gemma3.attention.sliding_window": 32, "gemma3.attention.key_length": 16,
    "gemma3.attention.value_length": 16, "gemma3.attention.scale": 0.25, "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0, "gemma3.rope.dimension_count": 16,
    "gemma3.attention.sliding_window_pattern": [True, False], "gemma3.final_logit_softcapping": 30.0,
    "gemma3.rope.freq_base_swa": 1e4, "split.count": 1, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0,
}  # fmt: skip
LLAMA_FACTS = {
    key.replace("gemma3", "llama"): value
    for key, value in GGUF_FACTS.items()
    if "sliding" not in key and "scaling" not in key
}
YARN = {
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "general.alignment": 32,
    "llama.rope.scaling.original_context_length": 1024, "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.yarn_beta_fast": 32.0, "llama.rope.scale_linear": 2.0,
}  # fmt: skip


def _holders(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inside in value.values():
            yield from _holders(inside)


def _mutated(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    for _ in range(int(rng.integers(1, 4))):
        holders = list(_holders(changed))
        holder = holders[int(rng.integers(len(holders)))]
        known = sorted(family_of(config).known_keys()) if rng.random() < 0.3 else sorted(holder)
        if known:
            holder[known[int(rng.integers(len(known)))]] = copy.deepcopy(ODD[int(rng.integers(len(ODD)))])
    return changed


@pytest.mark.parametrize("config", [LLAMA, GEMMA3, DEEPSEEK], ids=lambda config: str(config["model_type"]))
def test_a_mutated_config_gives_a_contract_or_one_of_two_errors(config: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    contract_from_config(config, cache=CacheChoice())
    for _ in range(400):
        changed = _mutated(config, rng)
        try:
            contract = contract_from_config(changed, cache=CacheChoice(latent=bool(rng.integers(2))))
            unread_keys(changed)
            if has_function_rule(family_of(changed).model_type) and changed["num_hidden_layers"] < 100:
                function_facts(changed, contract)
        except (UnreadableSource, BadRequest):
            continue
        except Exception as error:
            pytest.fail(f"{error!r} from {changed}")


def test_a_config_s_mutated_text_is_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    text = json.dumps(LLAMA).encode()
    path = tmp_path / "config.json"
    for _ in range(200):
        content = bytearray(text)
        content[int(rng.integers(len(content)))] = int(rng.integers(256))
        path.write_bytes(content[: int(rng.integers(len(content) // 2, len(content) + 1))] + b"}" * 2)
        try:
            contract_from_config(read_config(path), cache=CacheChoice())
        except (UnreadableSource, BadRequest):
            continue


def _write(path: Path, facts: dict[str, Any], odd: dict[str, tuple[GGUFValueType, Any]]) -> None:
    writer = GGUFWriter(path, "llama" if "llama.block_count" in facts else "gemma3")
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    kinds |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
    for key, (kind, value) in (
        {key: (kinds[type(value)], value) for key, value in facts.items()} | odd
    ).items():
        writer.add_key_value(key, value, kind)
    writer.add_tensor("token_embd.weight", np.ones((2, 64), np.float32))
    if "llama.rope.freq_base" in facts and "llama.rope.scaling.type" not in facts:
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 1, 1, 2, 8, 8], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read(path: Path) -> None:
    file = open_gguf(path)
    config = gguf_config(file)
    unread_metadata(file)
    gguf_vocabulary(file)
    if config["num_hidden_layers"] < 100:
        gguf_facts(file, config, None)


@pytest.mark.parametrize(
    "facts", [GGUF_FACTS, LLAMA_FACTS, LLAMA_FACTS | YARN], ids=["gemma3", "llama", "yarn"]
)
def test_mutated_metadata_is_read_or_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    path = tmp_path / "x.gguf"
    for key in facts:
        for odd in GGUF_ODD:
            chosen = {key: odd}
            if rng.random() < 0.3:
                chosen[sorted(facts)[int(rng.integers(len(facts)))]] = GGUF_ODD[
                    int(rng.integers(len(GGUF_ODD)))
                ]
            _write(path, facts, chosen)
            try:
                _read(path)
            except (UnreadableSource, BadRequest):
                continue
            except Exception as error:
                pytest.fail(f"{error!r} from {chosen}")


def test_a_mutated_header_is_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    path = tmp_path / "x.gguf"
    _write(path, GGUF_FACTS, {})
    whole = path.read_bytes()
    header = GGUFReader(path).data_offset
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            content[int(rng.integers(4, header))] = int(rng.choice([0, 1, 8, 9, 127, 255]))
        path.write_bytes(content)
        try:
            _read(path)
        except (UnreadableSource, BadRequest):
            continue
        except Exception as error:
            pytest.fail(f"{error!r} from {bytes(content[:header])!r}")
