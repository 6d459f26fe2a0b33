"""Contracts from a Hugging Face config.json: one canonical form, whatever the spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpact.contract.contract import Contract, LayerGroup, Layout, ModelIdentity, Quantization, Schema, Shard
from kvpact.contract.identity import NO_IDENTITY, IdentityDigests
from kvpact.contract.json_file import read_json_object
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import Family, family_of, unknown_keys
from kvpact.contract.sources.layer_groups import layer_groups
from kvpact.contract.sources.layer_rules import FULL
from kvpact.contract.sources.model_config import canonical_config
from kvpact.contract.sources.numbers import positive_int
from kvpact.contract.sources.overrides import override_config
from kvpact.contract.sources.rope_settings import rope_settings, unknown_rope_keys
from kvpact.contract.sources.rope_types import stretch
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest
from kvpact.types import ByteOrder, Dtype, Packing

__all__ = ["contract_from_config", "override_config", "own_cache_choice", "read_config", "unread_keys"]


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path`, a file or a folder that holds it.

    Raises:
        UnreadableSource: no such file, a file beyond what a config is, or not one JSON object.
    """
    return read_json_object(path / "config.json" if path.is_dir() else path)


def unread_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Config keys that nothing here reads: a person should know whether they change the model's function."""
    config = canonical_config(config)
    return unknown_keys(config, family_of(config)) + unknown_rope_keys(config)


def contract_from_config(
    config: Mapping[str, Any],
    *,
    cache: CacheChoice,
    identity: IdentityDigests = NO_IDENTITY,
    context_tokens: int | None = None,
    compute_dtype: Dtype = Dtype.FLOAT32,
    name: str = "",
    engine: str = "",
) -> Contract:
    """The contract of a whole, unsharded model. `context_tokens` None: as many positions as the model has.

    Raises:
        UnreadableSource: an unknown model or rope type, or a fact absent, contradictory or out of range.
        BadRequest: `context_tokens` is more than the model has.
    """
    config = canonical_config(config)
    family = family_of(config)
    groups = layer_groups(config, family, cache)
    model = ModelIdentity(
        architecture=family.model_type,
        function_digest=identity.function_digest,
        lm_head_digest=identity.lm_head_digest,
        tokenizer_digest=identity.tokenizer_digest,
        compute_dtype=compute_dtype,
        context_tokens=_context(config, family, context_tokens),
        name=name,
        engine=engine,
    )
    contract = Contract(
        schema=Schema(),
        model=model,
        layer_groups=groups,
        layout=_layout(cache, cache.dtype or compute_dtype, groups),
    )
    validate_contract(contract)
    return contract


def own_cache_choice(config: Mapping[str, Any]) -> CacheChoice:
    """The form in which transformers' own cache keeps keys: rotated, the family's lane order, latent rows."""
    family = family_of(config)
    return CacheChoice(stored_lane_order=family.cache_lane_order, latent=family.latent)


def _context(config: Mapping[str, Any], family: Family, asked: int | None) -> int:
    context = positive_int("max_position_embeddings", family.value(config, "max_position_embeddings"))
    if asked is None:
        return context
    settings = rope_settings(config, family, FULL)
    limit = math.floor(context * stretch(settings, context))
    if not 1 <= asked <= limit:
        raise BadRequest(
            f"max_model_len: found {asked}, expected 1 to max_position_embeddings = {limit}",
            param="max_model_len",
        )
    return asked


def _layout(cache: CacheChoice, dtype: Dtype, groups: tuple[LayerGroup, ...]) -> Layout:
    return Layout(
        axis_order=cache.axis_order,
        block_size=cache.block_size,
        packing=Packing.SEPARATE,
        key_dtype=dtype,
        value_dtype=dtype,
        byte_order=ByteOrder.LITTLE,
        key_quantization=Quantization(),
        value_quantization=Quantization(),
        shard=Shard(
            tensor_parallel_rank=0,
            tensor_parallel_size=1,
            head_start=0,
            head_end=max(group.kv_heads for group in groups),
            layer_start=0,
            layer_end=sum(len(group.layers) for group in groups),
        ),
    )
