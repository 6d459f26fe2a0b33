"""GGUF metadata as a config: what is read, what is refused, and by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from kvpact.contract.sources.gguf_config import gguf_config, unread_metadata
from kvpact.contract.sources.gguf_file import GgufFile, is_gguf, open_gguf
from kvpact.contract.sources.gguf_rope import llama3_formula
from kvpact.contract.sources.gguf_tokens import gguf_vocabulary
from kvpact.errors import UnreadableSource

LLAMA: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
GEMMA3 = LLAMA | {"attention.sliding_window": 32, "attention.key_length": 16}


def _file(path: Path, architecture: str, facts: dict[str, Any], **tensors: np.ndarray) -> GgufFile:
    writer = GGUFWriter(path / "x.gguf", architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    for key, value in facts.items():
        if value is not None:
            name = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
            adders[type(value)](name, value)
    for name, values in ({"anything": np.zeros(4)} | tensors).items():
        writer.add_tensor(name.replace("__", "."), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path / "x.gguf")


def test_facts_are_read_under_transformers_names(tmp_path: Path) -> None:
    config = gguf_config(_file(tmp_path, "llama", LLAMA, output__weight=np.zeros((3, 4))))
    assert config == {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    config = gguf_config(
        _file(tmp_path, "llama", LLAMA | {"rope.freq_base": None, "attention.head_count_kv": None})
    )
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["num_key_value_heads"] == 4
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 1024,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": pytest.approx(1.1386294, abs=1e-7),
            },
        ),
    ],
)
def test_each_scaling_becomes_its_rope_type(
    tmp_path: Path, facts: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = gguf_config(_file(tmp_path, "llama", LLAMA | facts))["rope_parameters"]
    assert found == {"rope_theta": 10000.0} | expected


def test_frequency_factors_of_no_known_formula_are_kept_as_numbers(tmp_path: Path) -> None:
    factors = np.array([1, 1, 3, 2, 5, 4, 7, 9])
    found = gguf_config(_file(tmp_path, "llama", LLAMA, rope_freqs__weight=factors))["rope_parameters"]
    assert found["rope_type"] == "longrope"
    assert found["short_factor"] == found["long_factor"] == factors.tolist()
    assert found["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("factor", "low", "high", "original", "theta", "pairs"),
    [(8.0, 1.0, 4.0, 8192, 5e5, 64), (32.0, 1.0, 4.0, 8192, 5e5, 32), (16.0, 2.0, 12.0, 4096, 1e4, 64)],
)
def test_a_formula_is_found_again_from_its_factors(
    factor: float, low: float, high: float, original: int, theta: float, pairs: int
) -> None:
    turns = theta ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    share = np.clip((original * turns - low) / (high - low), 0, 1)
    found = llama3_formula(1 / ((1 - share) / factor + share), theta)
    assert found == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high / low,
        "original_max_position_embeddings": original / low,
    }
    assert llama3_formula(np.full(pairs, 2.0) + turns, theta) is None


def test_layers_with_a_window_have_their_own_theta(tmp_path: Path) -> None:
    found = gguf_config(_file(tmp_path, "gemma3", GEMMA3 | {"rope.freq_base": 1e6}))
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
    assert found["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert found["query_pre_attn_scalar"] == 16
    large = gguf_config(_file(tmp_path, "gemma3", GEMMA3 | {"block_count": 62, "embedding_length": 80}))
    assert large["query_pre_attn_scalar"] == 20


@pytest.mark.parametrize(
    ("architecture", "facts", "tensors", "message"),
    [
        ("falcon", {}, {}, "'falcon' isn't known; known are gemma2"),
        ("llama", {"block_count": None}, {}, "block_count: found None"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, {}, "layer_norm_rms_epsilon is None"),
        ("llama", {"attention.value_length": 8}, {}, "value_length 8 differs"),
        ("llama", {"attention.sliding_window": 8}, {}, "sliding_window isn't served"),
        ("llama", {"rope.dimension_count": 8}, {}, "all of which turn in this architecture"),
        ("llama", {"rope.dimension_count": 32}, {}, "expected 1 to 16"),
        ("llama", {"rope.scaling.type": "foo"}, {}, "'foo', expected none, linear or yarn"),
        ("llama", {"rope.scaling.type": "linear"}, {}, r"rope\.scaling\.factor is missing"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier isn't served"),
        ("llama", {}, {"rope_freqs__weight": np.ones(7)}, "expected 8 numbers above 0"),
        ("llama", {}, {"rope_freqs__weight": -np.ones(8)}, "expected 8 numbers above 0"),
        ("llama", {"rope.scaling.type": "yarn"}, {"rope_freqs__weight": np.ones(8)}, "keep one"),
        ("llama", {}, {"blk__0__ffn_gate_inp__weight": np.ones((4, 4))}, "mixture of experts"),
        ("gemma3", {"attention.sliding_window": None}, {}, "sliding_window is missing"),
        ("gemma3", GEMMA3 | {"rope.freq_base": None}, {}, r"rope\.freq_base is missing"),
        ("phi3", {}, {"rope_factors_long__weight": np.ones(8)}, r"rope_factors_short\.weight is missing"),
        (
            "stablelm",
            {"attention.layer_norm_epsilon": 1e-5},
            {"blk__0__attn_q_norm__weight": np.ones(4)},
            "norm",
        ),
        ("llama", {"split.count": 2}, {}, "one of several parts"),
    ],
)
def test_what_cant_be_served_is_refused_by_name(
    tmp_path: Path, architecture: str, facts: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(UnreadableSource, match=message):
        gguf_config(_file(tmp_path, architecture, LLAMA | facts, **tensors))


def test_keys_that_nothing_reads_are_reported(tmp_path: Path) -> None:
    file = _file(tmp_path, "llama", LLAMA | {"logit_scale": 2.0})
    assert unread_metadata(file) == ("llama.logit_scale",)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(20), b"GGUF" + b"\xff" * 60])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UnreadableSource, match=r"x\.gguf"):
        open_gguf(path)
    assert is_gguf(path) is content.startswith(b"GGUF")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, "llama", LLAMA, token_embd__weight=np.ones((64, 64))).path
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnreadableSource, match=r"x\.gguf"):
        open_gguf(path)


def test_rows_that_fill_the_vocabulary_up_are_no_tokens(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "[PAD3]", "[PAD4]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 5, 5],
        "tokenizer.ggml.merges": ["a b"],
    }
    found = gguf_vocabulary(_file(tmp_path, "llama", LLAMA | tokens))
    assert found is not None
    assert (dict(found.texts), found.merges) == ({0: "a", 1: "b", 2: "ab"}, (("a", "b"),))
    pieces = gguf_vocabulary(_file(tmp_path, "llama", LLAMA | tokens | {"tokenizer.ggml.model": "llama"}))
    assert pieces is not None
    assert pieces.merges == ()
    assert gguf_vocabulary(_file(tmp_path, "llama", LLAMA)) is None
    with pytest.raises(UnreadableSource, match="merges can't be read"):
        gguf_vocabulary(_file(tmp_path, "llama", LLAMA | tokens | {"tokenizer.ggml.merges": ["ab"]}))
