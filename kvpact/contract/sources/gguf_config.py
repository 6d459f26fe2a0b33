"""GGUF metadata as the config.json of the same model: one mapping, from which everything else follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpact.contract.sources.families import FAMILIES
from kvpact.contract.sources.gguf_file import GgufFile
from kvpact.contract.sources.gguf_rope import rope_parameters
from kvpact.contract.sources.numbers import positive_int
from kvpact.types import LaneOrder

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
}
TOKENS = ("bos", "eos")
READ_KEYS = frozenset(
    {
        *SIZES,
        *EPSILONS.values(),
        *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.scale"),
        *("attention.sliding_window", "attention.sliding_window_pattern", "vocab_size"),
        *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear"),
        "rope.scaling.type",
        *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned"),
        *("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual", "tensor_data_layout"),
    }
)
ABOUT_THE_FILE = ("general.", "tokenizer.", "quantize.", "split.", "GGUF.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of the format: the model type that it is, and what its files leave unsaid."""

    model_type: str
    weight_lane_order: LaneOrder = LaneOrder.HALF_SPLIT
    """How files hold rotary rows of query and key weights."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Config flag, and the tensor inside a block that is there if it is true."""
    windowed: bool = False
    largest_blocks: int | None = None
    """Blocks of the one size whose scores are scaled by the width of all heads together."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Tensor inside block 0, and why a file with it is refused."""


NORMED_HEADS = {"attn_q_norm.weight": "norms of single heads aren't read from GGUF"}
EXPERTS = {
    "ffn_gate_inp.weight": "a mixture of experts isn't read from GGUF",
    "attn_q_norm.weight": "norms of queries and keys aren't part of this architecture",
}
ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        weight_lane_order=LaneOrder.ADJACENT,
        biases={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
        unserved=EXPERTS,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3", biases={"attention_bias": "attn_q.bias"}),
    "gemma2": Architecture(model_type="gemma2", windowed=True, largest_blocks=46),
    "gemma3": Architecture(model_type="gemma3_text", windowed=True, largest_blocks=62),
    "phi3": Architecture(model_type="phi3", windowed=True),
    "stablelm": Architecture(
        model_type="stablelm", biases={"use_qkv_bias": "attn_q.bias"}, unserved=NORMED_HEADS
    ),
    "gptneox": Architecture(model_type="gpt_neox", biases={"attention_bias": "attn_qkv.bias"}),
    "starcoder2": Architecture(model_type="starcoder2", biases={"use_bias": "attn_q.bias"}),
}


def architecture_of(file: GgufFile) -> Architecture:
    """What is known of the file's architecture. Raises UnreadableSource for one that isn't."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise file.broken(
            f"general.architecture {file.architecture!r} isn't known; known are"
            f" {', '.join(sorted(ARCHITECTURES))}",
            "general.architecture",
        )
    return found


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the file's model, class defaults where the format leaves a fact to the architecture.

    Raises:
        UnreadableSource: an unknown architecture, or a fact that is missing, contradictory or not served.
    """
    architecture = architecture_of(file)
    for name, why in architecture.unserved.items():
        if f"blk.0.{name}" in file.tensors:
            raise file.broken(f"{name}: {why}", name)
    family = FAMILIES[architecture.model_type]
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for key, name in SIZES.items():
        config[name] = positive_int(f"{file.architecture}.{key}", file.of_architecture(key))
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = positive_int(
        "attention.head_count_kv", file.whole(file.own("attention.head_count_kv"), heads)
    )
    head_dim = _head_dim(file, config)
    if "head_dim" in family.defaults and family.head_dim_is_given:
        config["head_dim"] = head_dim
    for name in family.function_defaults:
        if name in EPSILONS:
            config[name] = _positive(file, EPSILONS[name])
    for flag, tensor in architecture.biases.items():
        config[flag] = f"blk.0.{tensor}" in file.tensors
    config |= _attention(file, architecture, config, head_dim) | _vocabulary(file)
    if "use_parallel_residual" in family.function_defaults:
        said = file.of_architecture("use_parallel_residual")
        config["use_parallel_residual"] = (
            "blk.0.ffn_norm.weight" not in file.tensors if said is None else said
        )
    return config | _rope(file, config, head_dim)


def unread_metadata(file: GgufFile) -> tuple[str, ...]:
    """Keys that nothing here reads: a person should know whether they change the model's function."""
    own = f"{file.architecture}."
    return tuple(
        sorted(
            key
            for key in file.fields
            if not key.startswith(ABOUT_THE_FILE) and key.removeprefix(own) not in READ_KEYS
        )
    )


def _head_dim(file: GgufFile, config: Mapping[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    given = file.whole(file.own("attention.key_length"), None)
    if given is None and hidden % heads:
        raise file.broken(
            f"attention.key_length is missing, and {heads} heads don't divide {hidden}", "key_length"
        )
    head_dim = positive_int("attention.key_length", hidden // heads if given is None else given)
    value_dim = file.whole(file.own("attention.value_length"), head_dim)
    if value_dim != head_dim:
        raise file.broken(
            f"attention.value_length {value_dim} differs from attention.key_length {head_dim}", "value_length"
        )
    return head_dim


def _attention(
    file: GgufFile, architecture: Architecture, config: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Windows, softcaps and scale."""
    window = file.whole(file.own("attention.sliding_window"), None)
    if window is not None and not architecture.windowed:
        raise file.broken("attention.sliding_window isn't served for this architecture", "sliding_window")
    found: dict[str, Any] = {}
    if architecture.windowed:
        found["sliding_window"] = window or None
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := file.positive(file.own(key), None)) is not None:
            found[key] = cap
    pattern = file.of_architecture("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        found["layer_types"] = [kinds[bool(windowed)] for windowed in pattern]
    elif pattern is not None:
        found["sliding_window_pattern"] = positive_int("attention.sliding_window_pattern", pattern)
    if architecture.largest_blocks is not None:
        if window is None:
            raise file.broken(f"{file.architecture}.attention.sliding_window is missing", "sliding_window")
        wide = config["num_hidden_layers"] == architecture.largest_blocks
        scalar = config["hidden_size"] / config["num_attention_heads"] if wide else head_dim
        scale = file.positive(file.own("attention.scale"), None)
        found["query_pre_attn_scalar"] = float(scalar if scale is None else scale**-2)
    return found


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    found: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    if "token_embd.weight" in file.tensors:
        found["vocab_size"] = file.shape("token_embd.weight")[0]
    for token in TOKENS:
        number = file.whole(f"tokenizer.ggml.{token}_token_id", None)
        if number is not None:
            found[f"{token}_token_id"] = number
    return found


def _rope(file: GgufFile, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    parameters = rope_parameters(file, head_dim)
    family = FAMILIES[config["model_type"]]
    if "partial_rotary_factor" in parameters and family.partial_rotation is None:
        raise file.broken(
            f"rope.dimension_count is less than the {head_dim} lanes of a head, all of which turn in this"
            " architecture",
            "rope.dimension_count",
        )
    if family.partial_rotation is not None:
        parameters.setdefault("partial_rotary_factor", 1.0)
    if not family.rope_by_layer_type:
        original = "original_max_position_embeddings"
        beside = (
            {original: parameters[original]} if original in family.defaults and original in parameters else {}
        )
        return {"rope_parameters": parameters} | beside
    if file.of_architecture("rope.freq_base") is None:
        raise file.broken(f"{file.architecture}.rope.freq_base is missing", "rope.freq_base")
    theta = file.positive(file.own("rope.freq_base_swa"), LOCAL_THETA)
    local = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {"sliding_attention": local, "full_attention": parameters}}


LOCAL_THETA = 10_000.0
"""Theta of layers with a window in an architecture with two, for files that don't say it."""


def _positive(file: GgufFile, key: str) -> float:
    value = file.of_architecture(key)
    if not isinstance(value, float) or not 0 < value < 1:
        raise file.broken(f"{file.architecture}.{key} is {value!r}, expected a number in (0, 1)", key)
    return value
