"""GGUF files made from model folders without loss, as the published converters lay them out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
    "starcoder2": "starcoder2",
}
CONTROL, NORMAL, UNUSED = 3, 1, 5


def to_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of half-split heads as adjacent pairs."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(folder: Path, path: Path, **changes: Any) -> Path:
    """Writes the folder's model as float32 GGUF; `changes` are metadata under the architecture's name.

    A change to None leaves the key out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, architecture)
    for key, value in (_metadata(config) | changes).items():
        _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, folder, config["vocab_size"])
    for name, values in (_tensors(folder, config, architecture) | _rope_tensors(config)).items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return dict(rope.get("full_attention", rope))


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope, head_dim = _rope_of(config), _head_dim(config)
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    for key in ("layer_norm_eps", "norm_epsilon"):
        if key in config:
            found["attention.layer_norm_epsilon"] = float(config[key])
    if "rms_norm_eps" in config:
        found["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3") and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual"):
        if config.get(key) is not None:
            found[key] = config[key]
    if rope["rope_type"] in ("linear", "yarn"):
        kinds = {"linear": RopeScalingType.LINEAR, "yarn": RopeScalingType.YARN}
        found |= {"rope.scaling.type": kinds[rope["rope_type"]].value, "rope.scaling.factor": rope["factor"]}
    if "original_max_position_embeddings" in rope and rope["rope_type"] in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        ratio = config["max_position_embeddings"] / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(ratio) / math.log(original))
    return found


def _rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope, head_dim = _rope_of(config), _head_dim(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{part}.weight": np.array(rope[f"{part}_factor"]) for part in ("short", "long")}
    if rope["rope_type"] != "llama3":
        return {}
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for wavelength in 2 * math.pi / frequencies:
        share = (original / wavelength - low) / (high - low)
        blended = 1 / ((1 - share) / rope["factor"] + share)
        long_wave, short_wave = wavelength > original / low, wavelength < original / high
        factors.append(1 if short_wave else rope["factor"] if long_wave else blended)
    return {"rope_freqs.weight": np.array(factors)}


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    (key,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(key, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    found = {}
    for name, values in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = to_pairs(values, heads if "q_proj" in name else kv_heads)
        if architecture in ("gemma2", "gemma3") and "norm" in name:
            values = values + np.float32(1)
        if "query_key_value" in name:
            by_head = values.reshape(heads, 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape)
        found[f"{names.get_name(stem)}.{suffix}"] = values
    return found


def _add_tokenizer(writer: GGUFWriter, folder: Path, rows: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    texts = {number: text for text, number in content["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    numbers = range(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([added.get(number, texts.get(number, f"[PAD{number}]")) for number in numbers])
    kinds = [CONTROL if number in added else NORMAL if number in texts else UNUSED for number in numbers]
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
