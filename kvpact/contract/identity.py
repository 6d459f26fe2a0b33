"""Digests that say which function made a cache, and which contract a cache is under.

A function digest is SHA-256 over the digests of a model's tensors under transformers' names, as float32,
rotary rows in half-split order, embedding rows cut to the tokenizer's size, together with the config facts
that change the function and have no contract field. The output head is digested apart.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.canonical import canonical_text
from kvpact.contract.contract import Contract
from kvpact.types import ContractDigest

Rows = Iterable[tuple[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityDigests:
    """Who made the cache, 32 bytes each; None means unknown."""

    function_digest: bytes | None = None
    lm_head_digest: bytes | None = None
    tokenizer_digest: bytes | None = None


NO_IDENTITY = IdentityDigests()
_KNOWN: dict[int, tuple[weakref.ref[Contract], ContractDigest]] = {}
"""Digests of living contracts by the object's id; contracts are frozen."""


def contract_digest(contract: Contract) -> ContractDigest:
    """SHA-256 of the contract's canonical JSON. Names for people and the grouping of layers don't count.

    Computed once per contract object; the digest is forgotten with it.
    """
    known = _KNOWN.get(id(contract))
    if known is not None and known[0]() is contract:
        return known[1]
    text = canonical_text(contract)
    digest = ContractDigest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    key = id(contract)
    _KNOWN[key] = weakref.ref(contract, lambda gone: _forget(key, gone)), digest
    return digest


def _forget(key: int, gone: weakref.ref[Contract]) -> None:
    """Drops a digest with its contract, unless another contract has the id by now."""
    known = _KNOWN.get(key)
    if known is not None and known[0] is gone:
        del _KNOWN[key]


def function_digest(rows: Rows, facts: Mapping[str, Any]) -> bytes:
    """Digest of tensors that are in canonical form already, in any order, and of the facts beside them."""
    return combined_digest({name: tensor_digest(values) for name, values in rows}, facts)


def lm_head_digest(values_VD: NDArray[np.float32]) -> bytes:
    """Digest of the output head, one row per token id."""
    return bytes.fromhex(tensor_digest(values_VD))


def adapter_digest(rows: Rows) -> bytes:
    """Digest of an adapter's tensors by name, in any order: of what they hold, whatever its name."""
    return sha256_of({"adapter": {name: tensor_digest(values) for name, values in rows}})


def tensor_digest(values: NDArray[np.float32]) -> str:
    """SHA-256, in hexadecimal, of a tensor's shape and its little-endian float32 values."""
    little = np.ascontiguousarray(values, dtype="<f4")
    digest = hashlib.sha256(",".join(str(side) for side in values.shape).encode() + b"\n")
    digest.update(little.data if little.size else b"")
    return digest.hexdigest()


def combined_digest(digests: Mapping[str, str], facts: Mapping[str, Any]) -> bytes:
    """One digest of tensor digests by name and of the facts beside them."""
    return sha256_of({"facts": dict(facts), "tensors": dict(digests)})


def sha256_of(value: dict[str, Any]) -> bytes:
    """SHA-256 of canonical JSON: keys sorted, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
