"""Identity of a whole model from its weights: a folder of safetensors, or rows from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.identity import (
    IdentityDigests,
    Rows,
    combined_digest,
    sha256_of,
    tensor_digest,
)
from kvpact.contract.identity_cache import cache_entry, load_digests, store_digests
from kvpact.contract.identity_rows import carries_rotary_rows, reordered
from kvpact.contract.identity_tokenizer import vocabulary_of
from kvpact.contract.safetensors_rows import read_rows, weight_files
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.function_facts import (
    LM_HEAD,
    LM_HEAD_BIAS,
    FunctionFacts,
    function_facts,
    has_function_rule,
)
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.errors import UnreadableSource
from kvpact.types import LaneOrder


def digest_rows(rows: Rows, facts: FunctionFacts) -> IdentityDigests:
    """Function and output-head digests of a state dict's tensors, given one at a time in any order.

    Brings them to canonical form; buffers and tensors that the architecture doesn't have are left out.

    Raises:
        UnreadableSource: a tensor that the architecture needs is missing.
    """
    return _identity(_tensor_digests(rows, facts), facts)


def model_identity(folder: Path, config: Mapping[str, Any]) -> IdentityDigests:
    """Digests of a model folder with plain safetensors, read without torch; unknown ones are None.

    `config` is the folder's own, or one with changed fields. Tensor digests are kept in the user's cache.

    Raises:
        UnreadableSource: weights are pickled, quantised, damaged or incomplete.
    """
    files = weight_files(folder)
    vocabulary = vocabulary_of(folder)
    tokens = None if vocabulary is None else vocabulary.digest()
    if not files:
        return IdentityDigests(tokenizer_digest=tokens)
    if config.get("quantization_config"):
        raise UnreadableSource(
            f"{folder}: quantization_config says that weights are stored quantised; give plain weights",
            source=str(folder),
            key="quantization_config",
        )
    contract = contract_from_config(config, cache=CacheChoice())
    if not has_function_rule(contract.model.architecture):
        return IdentityDigests(tokenizer_digest=tokens)
    size = None if vocabulary is None or not vocabulary.texts else vocabulary.size()
    facts = function_facts(config, contract, vocabulary_size=size)
    found = kept_identity(files, facts, lambda: (row for file in files for row in read_rows(file)))
    return replace(found, tokenizer_digest=tokens)


def kept_identity(files: Sequence[Path], facts: FunctionFacts, rows: Callable[[], Rows]) -> IdentityDigests:
    """Digests of the weights in `files`; `rows` reads them and is called only if the cache has none."""
    how = (
        facts.lanes,
        facts.weight_lane_order,
        facts.vocabulary_size,
        facts.norms_add_one,
        sorted(facts.tensors),
    )
    entry = cache_entry(files, how)
    digests = load_digests(entry)
    if digests is None:
        digests = _tensor_digests(rows(), facts)
        store_digests(entry, digests)
    return _identity(digests, facts)


def _tensor_digests(rows: Rows, facts: FunctionFacts) -> dict[str, str]:
    wanted = facts.tensors | {LM_HEAD, LM_HEAD_BIAS}
    return {
        name: tensor_digest(_canonical(name, part, facts))
        for stored, values in rows
        for name, part in _one_by_one(facts.state_name(stored), values, facts)
        if name in wanted
    }


def _one_by_one(
    name: str, values: NDArray[np.float32], facts: FunctionFacts
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Experts that are stacked into one tensor, each under the name that it has in a file of its own."""
    head, found, kind = name.partition(f".{facts.split_experts}.") if facts.split_experts else ("", "", "")
    if not found or kind not in ("gate_up_proj", "down_proj"):
        yield name, values
        return
    for number, expert in enumerate(values):
        if kind == "down_proj":
            yield f"{head}{found}{number}.down_proj.weight", expert
        else:
            for part, half in zip(("gate", "up"), np.split(expert, 2), strict=True):
                yield f"{head}{found}{number}.{part}_proj.weight", half


def _canonical(name: str, values: NDArray[np.float32], facts: FunctionFacts) -> NDArray[np.float32]:
    if name in (facts.embedding, LM_HEAD, LM_HEAD_BIAS):
        return values if facts.vocabulary_size is None else values[: facts.vocabulary_size]
    if facts.norms_add_one and "norm" in name:
        values = values + np.float32(1)
    adjacent = facts.weight_lane_order is LaneOrder.ADJACENT
    if adjacent and facts.lanes is not None and carries_rotary_rows(name):
        return reordered(name, values, facts.lanes)
    return values


def _identity(digests: Mapping[str, str], facts: FunctionFacts) -> IdentityDigests:
    head = facts.embedding if facts.tied else LM_HEAD
    biases = {LM_HEAD_BIAS} if facts.head_bias else set()
    missing = sorted((facts.tensors | {head} | biases) - set(digests))
    if missing:
        raise UnreadableSource(
            f"weights lack {missing[0]} and {len(missing) - 1} more tensors that the config asks for",
            source="weights",
            key=missing[0],
        )
    counted = {name: digests[name] for name in facts.tensors}
    output = bytes.fromhex(digests[head])
    if biases:
        output = sha256_of({"weight": digests[head], "bias": digests[LM_HEAD_BIAS]})
    return IdentityDigests(function_digest=combined_digest(counted, facts.values), lm_head_digest=output)
