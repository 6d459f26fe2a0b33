"""Contracts from a Hugging Face config.json: one canonical form, whatever the spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpact.contract.contract import (
    Contract,
    LayerGroup,
    Layout,
    ModelIdentity,
    Quantization,
    Rotary,
    Schema,
    Shard,
)
from kvpact.contract.identity import NO_IDENTITY, IdentityDigests
from kvpact.contract.rope import table_from_parameters
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import Family, family_of, unknown_keys
from kvpact.contract.sources.heads import head_dim_of, kv_heads_of, layer_count_of
from kvpact.contract.sources.numbers import flag, positive_int, wrong_value
from kvpact.contract.sources.overrides import override_config
from kvpact.contract.sources.rope_settings import rope_parameters_of, unknown_rope_keys
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import ByteOrder, Dtype, FrequencyPolicy, KeyState, LayerKind, Packing, RotationSite

__all__ = ["contract_from_config", "override_config", "read_config", "unread_keys"]


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path`, a file or a folder that holds it.

    Raises:
        UnreadableSource: no such file, or not one JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSource(f"can't read {file}: {error}", source=str(path)) from error
    except ValueError as error:
        raise UnreadableSource(f"{file} isn't JSON: {error}", source=str(path)) from error
    if not isinstance(config, dict):
        raise UnreadableSource(f"{file} holds no JSON object", source=str(path))
    return config


def unread_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Config keys that nothing here reads: a person should know whether they change the model's function."""
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
    family = family_of(config)
    groups = _layer_groups(config, family, cache)
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


def _context(config: Mapping[str, Any], family: Family, asked: int | None) -> int:
    limit = positive_int("max_position_embeddings", family.value(config, "max_position_embeddings"))
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise BadRequest(
            f"max_model_len: found {asked}, expected 1 to max_position_embeddings = {limit}",
            param="max_model_len",
        )
    return asked


def _layer_groups(config: Mapping[str, Any], family: Family, cache: CacheChoice) -> tuple[LayerGroup, ...]:
    head_dim = head_dim_of(config, family)
    rotary = Rotary(
        key_state=cache.key_state,
        site=RotationSite.READER if cache.key_state is KeyState.RAW else RotationSite.WRITER,
        rotary_dim=head_dim,
        lane_offset=0,
        stored_lane_order=cache.stored_lane_order,
        frequency_policy=FrequencyPolicy.FROZEN,
        tables=(table_from_parameters(rope_parameters_of(config, family, head_dim)),),
    )
    windows = _windows(config, family)
    return tuple(
        LayerGroup(
            layers=tuple(layer for layer, own in enumerate(windows) if own == window),
            kind=LayerKind.FULL if window is None else LayerKind.SLIDING,
            window=window,
            kv_heads=kv_heads_of(config, family),
            key_dim=head_dim,
            value_dim=head_dim,
            softmax_scale=head_dim**-0.5,
            softcap=None,
            sinks=False,
            temperature=None,
            latent=None,
            rotary=rotary,
        )
        for window in dict.fromkeys(windows)
    )


def _windows(config: Mapping[str, Any], family: Family) -> list[int | None]:
    """Window of each layer, None for full attention. Windows are off unless use_sliding_window is true."""
    layers = layer_count_of(config, family)
    full: list[int | None] = [None] * layers
    if "use_sliding_window" not in family.defaults:
        return full
    kinds = _layer_types(config, family, layers)
    if not flag("use_sliding_window", family.value(config, "use_sliding_window")):
        return full
    size = family.value(config, "sliding_window")
    if size is None and "sliding_attention" not in (kinds or ()):
        return full
    window = positive_int("sliding_window", size)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    first = family.value(config, "max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise wrong_value("max_window_layers", first, "a whole number of at least 0")
    return [window if layer >= first else None for layer in range(layers)]


def _layer_types(config: Mapping[str, Any], family: Family, layers: int) -> list[str] | None:
    kinds = family.value(config, "layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise wrong_value("layer_types", kinds, f"a list of {layers} layer types")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise wrong_value(f"layer_types[{layer}]", kind, "full_attention or sliding_attention")
    return kinds


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
            head_end=groups[0].kv_heads,
            layer_start=0,
            layer_end=sum(len(group.layers) for group in groups),
        ),
    )
