"""Contracts from config.json: families, defaults and spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpact.contract.contract import Contract
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config, read_config, unread_keys
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import AxisOrder, Dtype, KeyState, LayerKind, RotationSite

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
QWEN3: dict[str, Any] = LLAMA | {"model_type": "qwen3", "head_dim": 32}


def _contract(config: dict[str, Any], **choice: Any) -> Contract:
    return contract_from_config(config, cache=CacheChoice(**choice))


def test_a_llama_config_gives_one_full_group_with_the_engine_s_default_cache() -> None:
    contract = _contract(LLAMA)
    (group,) = contract.layer_groups
    assert (group.layers, group.kind, group.window) == ((0, 1, 2, 3), LayerKind.FULL, None)
    assert (group.kv_heads, group.key_dim, group.value_dim, group.softmax_scale) == (2, 16, 16, 0.25)
    assert (group.rotary.key_state, group.rotary.site) == (KeyState.ROTATED, RotationSite.WRITER)
    assert (group.rotary.rotary_dim, len(group.rotary.tables[0].inv_freq)) == (16, 8)
    assert (contract.layout.axis_order, contract.layout.block_size) == (AxisOrder.NHD, 16)
    assert contract.layout.key_dtype is contract.layout.value_dtype is Dtype.FLOAT32
    assert contract.model.context_tokens == 4096


def test_raw_keys_are_rotated_by_the_reader() -> None:
    rotary = _contract(LLAMA, key_state=KeyState.RAW).layer_groups[0].rotary
    assert (rotary.key_state, rotary.site) == (KeyState.RAW, RotationSite.READER)


def test_a_cache_without_a_dtype_takes_the_compute_dtype() -> None:
    contract = contract_from_config(LLAMA, cache=CacheChoice(), compute_dtype=Dtype.BFLOAT16)
    assert contract.layout.key_dtype is contract.layout.value_dtype is Dtype.BFLOAT16


def test_head_dim_wins_over_hidden_size_by_heads() -> None:
    group = _contract(QWEN3).layer_groups[0]
    assert (group.key_dim, group.rotary.rotary_dim) == (32, 32)
    assert group.softmax_scale == 32**-0.5


@pytest.mark.parametrize(
    ("config", "head_dim", "kv_heads", "context", "layers"),
    [({"model_type": "llama"}, 128, 32, 2048, 32), ({"model_type": "qwen3"}, 128, 32, 32768, 32)],
)
def test_absent_keys_take_the_architecture_s_own_defaults(
    config: dict[str, Any], head_dim: int, kv_heads: int, context: int, layers: int
) -> None:
    contract = _contract(config)
    group = contract.layer_groups[0]
    assert (group.key_dim, group.kv_heads) == (head_dim, kv_heads)
    assert (contract.model.context_tokens, contract.layer_count()) == (context, layers)


def test_null_kv_heads_are_as_many_as_query_heads() -> None:
    assert _contract(QWEN3 | {"num_key_value_heads": None}).layer_groups[0].kv_heads == 4


def test_a_window_is_off_unless_use_sliding_window_is_true() -> None:
    off = {"sliding_window": 8, "max_window_layers": 2}
    assert [group.kind for group in _contract(QWEN3 | off).layer_groups] == [LayerKind.FULL]
    listed = off | {"layer_types": ["sliding_attention"] * 4}
    assert [group.kind for group in _contract(QWEN3 | listed).layer_groups] == [LayerKind.FULL]


def test_max_window_layers_gives_the_first_sliding_layer() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    full, sliding = _contract(QWEN3 | on).layer_groups
    assert (full.layers, full.window) == ((0, 1, 2), None)
    assert (sliding.layers, sliding.kind, sliding.window) == ((3,), LayerKind.SLIDING, 8)


def test_layer_types_win_over_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": kinds}
    groups = _contract(QWEN3 | on).layer_groups
    assert [(group.layers, group.window) for group in groups] == [((0, 2), 8), ((1, 3), None)]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types[3]"),
        ({"use_sliding_window": "yes"}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"head_dim": None}, "head_dim"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        _contract(QWEN3 | change)
    assert refusal.value.key == key
    assert key in str(refusal.value)


def test_heads_that_dont_divide_a_llama_s_hidden_size_are_refused() -> None:
    with pytest.raises(UnreadableSource, match="multiple of num_attention_heads = 4"):
        _contract(LLAMA | {"hidden_size": 66, "head_dim": 16})


@pytest.mark.parametrize("model_type", ["mamba", None, 3])
def test_an_unknown_model_type_is_refused_and_known_ones_are_listed(model_type: object) -> None:
    with pytest.raises(UnreadableSource, match=r"known|expected one of.* llama, .* qwen3, "):
        _contract(LLAMA | {"model_type": model_type})


def test_a_context_longer_than_the_model_has_is_refused() -> None:
    assert contract_from_config(LLAMA, cache=CacheChoice(), context_tokens=100).model.context_tokens == 100
    with pytest.raises(BadRequest, match="max_model_len"):
        contract_from_config(LLAMA, cache=CacheChoice(), context_tokens=5000)


def test_keys_that_nothing_reads_are_reported() -> None:
    config = LLAMA | {"logit_scale": 2.0, "rope_scaling": {"rope_type": "default", "beta": 1}}
    assert unread_keys(config) == ("logit_scale", "rope_scaling.beta")
    assert unread_keys(QWEN3 | {"max_window_layers": 2}) == ()


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == LLAMA
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableSource, match="isn't JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UnreadableSource, match="no JSON object"):
        read_config(tmp_path)
