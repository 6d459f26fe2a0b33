"""Digests that say which function made a cache, and which contract a cache is under.

A function digest is SHA-256 over the digests of a model's tensors under transformers' names, as float32,
rotary rows in half-split order, embedding rows cut to the tokenizer's size, together with the config facts
that change the function and have no contract field. The output head is digested apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.canonical import PEOPLE_ONLY, contract_values
from kvpact.contract.contract import Contract
from kvpact.contract.identity_cache import cache_entry, load_digests, store_digests
from kvpact.contract.safetensors_rows import read_rows, weight_files
from kvpact.contract.sources.function_facts import (
    EMBEDDING,
    LM_HEAD,
    FunctionFacts,
    carries_rotary_rows,
    function_facts,
)
from kvpact.errors import UnreadableSource
from kvpact.types import ContractDigest, LaneOrder

Rows = Iterable[tuple[str, NDArray[np.float32]]]
RUNTIME_TOKENIZER_KEYS = ("truncation", "padding")
"""Settings of a call that a tokenizer.json may happen to carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityDigests:
    """Who made the cache, 32 bytes each; None means unknown."""

    function_digest: bytes | None = None
    lm_head_digest: bytes | None = None
    tokenizer_digest: bytes | None = None


NO_IDENTITY = IdentityDigests()


def contract_digest(contract: Contract) -> ContractDigest:
    """SHA-256 of the contract's canonical JSON. Names for people and the grouping of layers don't count."""
    values = contract_values(contract)
    return ContractDigest(_sha256({key: value for key, value in values.items() if key not in PEOPLE_ONLY}))


def function_digest(rows: Rows, facts: Mapping[str, Any]) -> bytes:
    """Digest of tensors that are in canonical form already, in any order, and of the facts beside them."""
    return _combined({name: tensor_digest(values) for name, values in rows}, facts)


def lm_head_digest(values_VD: NDArray[np.float32]) -> bytes:
    """Digest of the output head, one row per token id."""
    return bytes.fromhex(tensor_digest(values_VD))


def tensor_digest(values: NDArray[np.float32]) -> str:
    """SHA-256, in hexadecimal, of a tensor's shape and its little-endian float32 values."""
    little = np.ascontiguousarray(values, dtype="<f4")
    digest = hashlib.sha256(",".join(str(side) for side in values.shape).encode() + b"\n")
    digest.update(little.data if little.size else b"")
    return digest.hexdigest()


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
    tokenizer = tokenizer_digest(folder)
    if not files:
        return IdentityDigests(tokenizer_digest=tokenizer)
    if config.get("quantization_config"):
        raise UnreadableSource(
            f"{folder}: quantization_config says that weights are stored quantised; give plain weights",
            source=str(folder),
            key="quantization_config",
        )
    facts = function_facts(config, vocabulary_size=vocabulary_size(folder))
    how = (facts.head_dim, facts.weight_lane_order, facts.vocabulary_size, sorted(facts.tensors))
    entry = cache_entry(files, how)
    digests = load_digests(entry)
    if digests is None:
        digests = _tensor_digests((row for file in files for row in read_rows(file)), facts)
        store_digests(entry, digests)
    return replace(_identity(digests, facts), tokenizer_digest=tokenizer)


def tokenizer_digest(path: Path) -> bytes | None:
    """SHA-256 of a tokenizer.json's canonical content; `path` is the file or its folder. None without one.

    Raises:
        UnreadableSource: the file isn't a JSON object.
    """
    content = _tokenizer(path)
    if content is None:
        return None
    kept = {key: value for key, value in content.items() if key not in RUNTIME_TOKENIZER_KEYS}
    model = kept.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        kept["model"] = model | {"merges": merges}
    return _sha256(kept)


def vocabulary_size(path: Path) -> int | None:
    """One more than the largest token id of a tokenizer.json, a file or in a folder; None where unknown."""
    content = _tokenizer(path) or {}
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [token["id"] for token in content.get("added_tokens") or ()]
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    return max(ids) + 1 if ids else None


def half_split_rows(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows [heads * head_dim, ...] from adjacent to half-split: row 2i to i, 2i + 1 to i + head_dim / 2."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _tensor_digests(rows: Rows, facts: FunctionFacts) -> dict[str, str]:
    digests: dict[str, str] = {}
    for name, values in rows:
        if name == LM_HEAD or name in facts.tensors:
            digests[name] = tensor_digest(_canonical(name, values, facts))
    return digests


def _canonical(name: str, values: NDArray[np.float32], facts: FunctionFacts) -> NDArray[np.float32]:
    if name in (EMBEDDING, LM_HEAD):
        return values if facts.vocabulary_size is None else values[: facts.vocabulary_size]
    if facts.weight_lane_order is LaneOrder.ADJACENT and carries_rotary_rows(name):
        return half_split_rows(values, facts.head_dim)
    return values


def _identity(digests: Mapping[str, str], facts: FunctionFacts) -> IdentityDigests:
    head = EMBEDDING if facts.tied else LM_HEAD
    missing = sorted((facts.tensors | {head}) - set(digests))
    if missing:
        raise UnreadableSource(
            f"weights lack {missing[0]} and {len(missing) - 1} more tensors that the config asks for",
            source="weights",
            key=missing[0],
        )
    counted = {name: digests[name] for name in facts.tensors}
    return IdentityDigests(
        function_digest=_combined(counted, facts.values), lm_head_digest=bytes.fromhex(digests[head])
    )


def _combined(digests: Mapping[str, str], facts: Mapping[str, Any]) -> bytes:
    return _sha256({"facts": dict(facts), "tensors": dict(digests)})


def _sha256(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _tokenizer(path: Path) -> dict[str, Any] | None:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableSource(f"can't read {file}: {error}", source=str(file)) from error
    if not isinstance(content, dict):
        raise UnreadableSource(f"{file} holds no JSON object", source=str(file))
    return content
