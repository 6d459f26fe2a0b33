"""Sources made to hang, to fill memory or to crash: each is refused at once, and by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from kvpact.cli.sources import load_source, parse_settings
from kvpact.contract.identity_tokenizer import vocabulary_of
from kvpact.contract.json_file import CONFIG_CAP_BYTES, DEEPEST, is_too_deep
from kvpact.contract.safetensors_rows import read_rows, weight_files
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.function_facts import function_facts
from kvpact.contract.sources.gguf_bounds import MOST_ELEMENTS
from kvpact.contract.sources.gguf_config import gguf_config
from kvpact.contract.sources.gguf_file import open_gguf
from kvpact.contract.sources.gguf_tokens import gguf_vocabulary
from kvpact.contract.sources.huggingface import contract_from_config, override_config, read_config
from kvpact.errors import BadRequest, UnreadableSource

pytestmark = pytest.mark.timeout(20)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
FACTS: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 32,
    "attention.key_length": 16,
    "rope.freq_base": 10000.0,
}
UINT8, FLOAT32, STRING, ARRAY = 0, 6, 8, 9
DEEP = 100_000


def _header(key: str, kind: int, value: bytes, *, pairs: int = 1, tensors: int = 0) -> bytes:
    name = struct.pack("<Q", len(key)) + key.encode()
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + name + struct.pack("<I", kind) + value


def _list(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_header("a.list", ARRAY, _list(UINT8, 2**40)), "a.list: 1099511627776 of at least 1 bytes, but 0"),
        (_header("a.list", ARRAY, _list(FLOAT32, 2**62)), "a.list: 4611686018427387904 of at least 4"),
        (_header("a.list", ARRAY, _list(STRING, 2**62)), "a.list"),
        (_header("a.list", ARRAY, _list(ARRAY, 1) * 2000), "lists more than 4 deep"),
        (_header("a.list", ARRAY, _list(77, 2**62)), "type 77 isn't known"),
        (_header("a.text", STRING, struct.pack("<Q", 2**60)), "a.text: 1152921504606846976"),
        (_header("a", UINT8, b"1", pairs=2**50), "keys: 1125899906842624"),
        (_header("a", UINT8, b"1", tensors=2**50), "tensors: 1125899906842624"),
        (
            _header("a.list", ARRAY, _list(UINT8, MOST_ELEMENTS + 1) + bytes(MOST_ELEMENTS + 1)),
            "a.list: lists of more than 4194304 elements in all",
        ),
    ],
    ids=range(9),
)
def test_a_count_beyond_the_file_is_refused_before_it_is_read(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UnreadableSource, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("split.count", GGUFValueType.STRING, "2"),
        ("gemma3.rope.freq_base", GGUFValueType.STRING, "1e4"),
        ("gemma3.rope.freq_base", GGUFValueType.FLOAT32, -1.0),
        ("gemma3.rope.dimension_count", GGUFValueType.ARRAY, [8, 8]),
        ("gemma3.rope.scaling.type", GGUFValueType.UINT32, 3),
        ("gemma3.rope.scale_linear", GGUFValueType.STRING, "2"),
        ("gemma3.attn_logit_softcapping", GGUFValueType.STRING, "50"),
        ("gemma3.attention.scale", GGUFValueType.FLOAT32, 0.0),
        ("gemma3.attention.sliding_window", GGUFValueType.STRING, "8"),
        ("gemma3.rope.freq_base_swa", GGUFValueType.FLOAT64, 1e300),
        ("tokenizer.ggml.tokens", GGUFValueType.UINT32, 7),
        ("tokenizer.ggml.tokens", GGUFValueType.ARRAY, [1, 2]),
    ],
)
def test_metadata_of_another_type_is_refused_by_its_key(
    tmp_path: Path, key: str, kind: GGUFValueType, value: Any
) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "gemma3")
    for name, fact in FACTS.items():
        if f"gemma3.{name}" != key:
            (writer.add_float32 if isinstance(fact, float) else writer.add_uint32)(f"gemma3.{name}", fact)
    writer.add_key_value(key, value, kind)
    writer.add_tensor("anything", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnreadableSource, match=f"{key}: found ") as caught:
        _read_gguf(path)
    assert caught.value.key == key


def _read_gguf(path: Path) -> None:
    file = open_gguf(path)
    gguf_vocabulary(file)
    gguf_config(file)


@pytest.mark.parametrize("depth", [DEEPEST + 1, DEEP])
@pytest.mark.parametrize("forms", [("[", "]"), ('{"a":', "}")])
def test_values_deep_in_each_other_are_refused(tmp_path: Path, depth: int, forms: tuple[str, str]) -> None:
    before, after = forms
    deep = before * depth + "1" + after * depth
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(f'{{"deep": {deep}}}')
    with pytest.raises(UnreadableSource, match=f"more than {DEEPEST} deep"):
        read_config(tmp_path)
    with pytest.raises(UnreadableSource, match=f"more than {DEEPEST} deep"):
        vocabulary_of(tmp_path)
    with pytest.raises(BadRequest, match=f"more than {DEEPEST} deep"):
        override_config(LLAMA, {"rope_theta": deep})
    assert not is_too_deep([[{"a": [1]}], {}])


def test_a_file_beyond_what_a_config_is_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(CONFIG_CAP_BYTES + 1)
    with pytest.raises(UnreadableSource, match="more than 32 MiB"):
        read_config(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(tmp_path) == LLAMA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3_000_000}, "num_hidden_layers: found 3000000, expected at most 10000"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers: found 1000.*, expected at most 10000"),
        ({"head_dim": 2**31}, "head_dim: found 2147483648, expected at most 65536"),
        ({"num_attention_heads": 2**20, "hidden_size": 2**24}, "num_attention_heads.*at most 65536"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings.*at most 2147483647"),
        ({"rope_theta": 10**400}, "rope_theta: found 1000.*float32"),
        ({"rope_scaling": {"type": "dynamic", "factor": 10**400}}, "factor: found 1000.*float32"),
        ({"rope_scaling": {"type": "linear", "factor": [1] * 100}}, r"factor: found \[1, .*, \.\.\.\]"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 10**400}},
            "original_max_position_embeddings.*at most 2147483647",
        ),
    ],
)
def test_numbers_beyond_any_model_are_refused_with_their_bound(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableSource, match=message):
        contract_from_config(LLAMA | change, cache=CacheChoice())


def test_tensors_that_no_model_has_are_refused() -> None:
    contract = contract_from_config(LLAMA, cache=CacheChoice())
    with pytest.raises(UnreadableSource, match=r"rms_norm_eps: found 1000.*float32"):
        function_facts(LLAMA | {"rms_norm_eps": 10**400}, contract)
    moe = LLAMA | {"model_type": "qwen3_moe", "num_experts": 2**31 - 1}
    with pytest.raises(UnreadableSource, match="num_experts: found 2147483647, expected at most"):
        function_facts(moe, contract_from_config(moe, cache=CacheChoice()))


@pytest.mark.parametrize(
    "places", ['{"weight_map": [1]}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_an_index_of_anything_but_names_is_refused(tmp_path: Path, places: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(places)
    with pytest.raises(UnreadableSource, match="index"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "header", [b"[" * DEEP, b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,0]}}' % 2**70]
)
def test_a_hostile_tensor_header_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnreadableSource, match=r"model\.safetensors"):
        list(read_rows(file))


def test_what_names_no_source_is_refused(tmp_path: Path) -> None:
    settings = parse_settings("--set", ())
    for text in ("a" * 5000, "/" + "a" * 5000, "a\0b"):
        with pytest.raises(UnreadableSource):
            load_source(text, settings)
    capture = tmp_path / "x.kvpact"
    capture.write_bytes(b"\x89KVPACT\n")
    with pytest.raises(UnreadableSource, match="kvpact handoff show"):
        load_source(str(capture), settings)
    with pytest.raises(BadRequest, match="max_model_len"):
        parse_settings("--set", [f"max_model_len={'9' * 5000}"])
