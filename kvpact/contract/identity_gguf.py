"""Identity of a model that lies in a GGUF file, and its tensors under transformers' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.identity import IdentityDigests
from kvpact.contract.identity_model import kept_identity
from kvpact.contract.identity_rows import reordered
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.function_facts import LM_HEAD, FunctionFacts, function_facts
from kvpact.contract.sources.gguf_config import architecture_of
from kvpact.contract.sources.gguf_file import GgufFile
from kvpact.contract.sources.gguf_tokens import gguf_vocabulary
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.types import LaneOrder

Row = tuple[str, NDArray[np.float32]]


def gguf_identity(file: GgufFile, config: Mapping[str, Any]) -> IdentityDigests:
    """Digests of a GGUF's model, read without torch and kept in the user's cache.

    `config` is the file's own, or one with changed fields. The same as those of a model folder that the file
    was made from without loss.

    Raises:
        UnreadableSource: a tensor is missing or can't be read.
    """
    vocabulary = gguf_vocabulary(file)
    size = None if vocabulary is None else vocabulary.size()
    facts = gguf_facts(file, config, size)
    found = kept_identity([file.path], facts, lambda: stored_rows(file, facts))
    return replace(found, tokenizer_digest=None if vocabulary is None else vocabulary.digest())


def gguf_facts(file: GgufFile, config: Mapping[str, Any], vocabulary_size: int | None) -> FunctionFacts:
    """Function facts of the file's model, with the lane order in which its rows lie."""
    contract = contract_from_config(config, cache=CacheChoice())
    order = architecture_of(file).weight_lane_order
    return function_facts(config, contract, vocabulary_size=vocabulary_size, weight_lane_order=order)


def state_rows(file: GgufFile, config: Mapping[str, Any]) -> Iterator[Row]:
    """The model's state dict as transformers has it: names, values, and the order of rotary rows.

    Raises:
        UnreadableSource: a tensor is missing or can't be read.
    """
    facts = gguf_facts(file, config, None)
    for name, values in stored_rows(file, facts):
        if facts.weight_lane_order is LaneOrder.ADJACENT and facts.lanes is not None:
            values = reordered(name, values, facts.lanes)
        yield name, values


def stored_rows(file: GgufFile, facts: FunctionFacts) -> Iterator[Row]:
    """Tensors under transformers' names with its values, rotary rows in the order of the file."""
    names = facts.tensors if facts.tied else facts.tensors | {LM_HEAD}
    stored_name = _StoredNames(file)
    for name in sorted(names):
        values = file.tensor(stored_name(name))
        if facts.norms_add_one and "norm" in name:
            values = values - np.float32(1)
        if "query_key_value" in name and facts.lanes is not None:
            heads = facts.lanes.kv_heads
            parts = values.reshape(3, heads, -1, *values.shape[1:])
            values = np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(values.shape)
        yield name, values


class _StoredNames:
    """From transformers' name of a tensor to the file's."""

    def __init__(self, file: GgufFile) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        (architecture,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
        self._file = file
        self._map = get_tensor_name_map(architecture, file.of_architecture("block_count"))

    def __call__(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        found = self._map.get_name(stem)
        if found is None:
            raise self._file.broken(f"the format has no name for tensor {name}", name)
        return f"{found}.{suffix}"
