"""Whether a contract is whole: every enum set, every number there and in range, every layer covered once."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np

from kvpact.contract.contract import Contract, LayerGroup, Layout, Quantization, Rotary, RotaryTable, Shard
from kvpact.errors import BadRequest
from kvpact.types import (
    AxisOrder,
    Basis,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    RotationSite,
    ScaleSource,
)

DIGEST_BYTES = 32


def validate_contract(contract: Contract) -> None:
    """Gives nothing back for a whole contract.

    Raises:
        BadRequest: names the first field that is unset, absent or out of range, and what was found.
    """
    _whole("schema_major", contract.schema.major, 1)
    _whole("schema_minor", contract.schema.minor, 0)
    model = contract.model
    _require(bool(model.architecture), "architecture", model.architecture, "a model type")
    for name in ("function_digest", "lm_head_digest", "tokenizer_digest"):
        digest = getattr(model, name)
        _require(digest is None or len(digest) == DIGEST_BYTES, name, digest, f"{DIGEST_BYTES} bytes or none")
    _enum("compute_dtype", model.compute_dtype, Dtype)
    _whole("context_tokens", model.context_tokens, 1)
    for group in contract.layer_groups:
        _check_group(group)
    _check_coverage(contract)
    _check_layout(contract.layout, contract)


def _check_coverage(contract: Contract) -> None:
    layers = sorted(layer for group in contract.layer_groups for layer in group.layers)
    _require(bool(layers), "layers", layers, "at least one layer")
    _require(layers == list(range(len(layers))), "layers", layers, "each layer from 0 on exactly once")


def _check_group(group: LayerGroup) -> None:
    _require(bool(group.layers), "layers", group.layers, "at least one layer in each group")
    for layer in group.layers:
        _whole("layers", layer, 0)
    _enum("kind", group.kind, LayerKind)
    if group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
        _whole("window", group.window, 1)
    else:
        _require(group.window is None, "window", group.window, f"none for kind {group.kind}")
    _whole("kv_heads", group.kv_heads, 1)
    _whole("key_dim", group.key_dim, 1)
    _whole("value_dim", group.value_dim, 1)
    _positive("softmax_scale", group.softmax_scale)
    if group.softcap is not None:
        _positive("softcap", group.softcap)
    _require(isinstance(group.sinks, bool), "sinks", group.sinks, "true or false")
    if group.temperature is not None:
        _require(
            bool(group.temperature.formula), "temperature", group.temperature.formula, "a formula's name"
        )
        for parameter in group.temperature.parameters:
            _finite("temperature", parameter)
    _check_latent(group)
    _check_rotary(group.rotary, group.key_dim)


def _check_latent(group: LayerGroup) -> None:
    if group.kind is not LayerKind.MLA_LATENT:
        _require(group.latent is None, "latent", group.latent, f"none for kind {group.kind}")
        return
    if group.latent is None:
        raise _wrong("latent", None, "the dimensions of a latent row")
    _whole("latent_dim", group.latent.latent_dim, 1)
    _whole("rope_dim", group.latent.rope_dim, 1)


def _check_rotary(rotary: Rotary, key_dim: int) -> None:
    _enum("key_state", rotary.key_state, KeyState)
    _enum("site", rotary.site, RotationSite)
    _enum("stored_lane_order", rotary.stored_lane_order, LaneOrder)
    _enum("frequency_policy", rotary.frequency_policy, FrequencyPolicy)
    _enum("basis", rotary.basis, Basis)
    _whole("rotary_dim", rotary.rotary_dim, 0)
    _whole("lane_offset", rotary.lane_offset, 0)
    if rotary.key_state is KeyState.NONE:
        _require(rotary.rotary_dim == 0, "rotary_dim", rotary.rotary_dim, "0 for key_state none")
        _require(not rotary.tables, "tables", len(rotary.tables), "no table for key_state none")
        return
    _require(rotary.rotary_dim >= 2, "rotary_dim", rotary.rotary_dim, "at least 2 unless key_state is none")
    _require(rotary.rotary_dim % 2 == 0, "rotary_dim", rotary.rotary_dim, "an even number")
    end = rotary.lane_offset + rotary.rotary_dim
    _require(
        end <= key_dim,
        "rotary_dim",
        rotary.rotary_dim,
        f"lanes that end within key_dim {key_dim}, not at {end}",
    )
    _check_tables(rotary)


def _check_tables(rotary: Rotary) -> None:
    _require(bool(rotary.tables) or rotary.formula is not None, "inv_freq", (), "at least one table")
    for table in rotary.tables:
        _check_table(table, rotary.rotary_dim)
    uppers = [table.upper_length for table in rotary.tables]
    bounded = [upper for upper in uppers if upper is not None]
    _require(None not in uppers[:-1], "upper_length", uppers, "a bound on each table but the last")
    _require(bounded == sorted(set(bounded)), "upper_length", uppers, "bounds that grow")
    if rotary.formula is not None:
        _require(bool(rotary.formula.name), "formula", rotary.formula.name, "a formula's name")
        for parameter in rotary.formula.parameters:
            _finite("formula", parameter)
    sections = rotary.mrope_sections
    for section in sections:
        _whole("mrope_sections", section, 0)
    fits = not sections or sum(sections) == rotary.rotary_dim // 2
    _require(fits, "mrope_sections", sections, f"sections of {rotary.rotary_dim // 2} frequencies in all")


def _check_table(table: RotaryTable, rotary_dim: int) -> None:
    found, expected = len(table.inv_freq), rotary_dim // 2
    _require(found == expected, "inv_freq", f"{found} numbers", f"{expected} numbers, half of rotary_dim")
    for value in table.inv_freq:
        _finite("inv_freq", value)
        _require(float(np.float32(value)) == value, "inv_freq", value, "a float32 number")
    _positive("amplitude", table.amplitude)
    if table.upper_length is not None:
        _whole("upper_length", table.upper_length, 1)


def _check_layout(layout: Layout, contract: Contract) -> None:
    _enum("axis_order", layout.axis_order, AxisOrder)
    _whole("block_size", layout.block_size, 1)
    _enum("packing", layout.packing, Packing)
    _enum("key_dtype", layout.key_dtype, Dtype)
    _enum("value_dtype", layout.value_dtype, Dtype)
    _enum("byte_order", layout.byte_order, ByteOrder)
    _check_quantization("key_quantization", layout.key_quantization)
    _check_quantization("value_quantization", layout.value_quantization)
    _check_shard(layout.shard, contract)


def _check_quantization(name: str, quantization: Quantization) -> None:
    _enum(name, quantization.scheme, QuantizationScheme)
    if quantization.scheme is QuantizationScheme.NONE:
        bare = quantization == Quantization()
        _require(bare, name, quantization, "no granularity and no scales for scheme none")
        return
    _enum(f"{name}.granularity", quantization.granularity, QuantizationGranularity)
    _enum(f"{name}.scale_source", quantization.scale_source, ScaleSource)
    if quantization.scale_source is ScaleSource.FIXED:
        _require(bool(quantization.fixed_scales), f"{name}.fixed_scales", (), "the fixed scales")
    for scale in quantization.fixed_scales:
        _positive(f"{name}.fixed_scales", scale)


def _check_shard(shard: Shard, contract: Contract) -> None:
    _whole("shard.tensor_parallel_size", shard.tensor_parallel_size, 1)
    _whole("shard.tensor_parallel_rank", shard.tensor_parallel_rank, 0)
    inside = shard.tensor_parallel_rank < shard.tensor_parallel_size
    _require(
        inside, "shard.tensor_parallel_rank", shard.tensor_parallel_rank, "less than tensor_parallel_size"
    )
    for name in ("head_start", "head_end", "layer_start", "layer_end"):
        _whole(f"shard.{name}", getattr(shard, name), 0)
    heads = max(group.kv_heads for group in contract.layer_groups)
    _require(
        shard.head_start < shard.head_end <= heads,
        "shard.head_end",
        shard.head_end,
        f"heads within [0, {heads})",
    )
    layers = contract.layer_count()
    held = shard.layer_start < shard.layer_end <= layers
    _require(held, "shard.layer_end", shard.layer_end, f"layers within [0, {layers})")


def _wrong(field: str, found: Any, expected: str) -> BadRequest:
    return BadRequest(f"contract field {field}: found {found!r}, expected {expected}", param=field)


def _require(holds: bool, field: str, found: Any, expected: str) -> None:
    if not holds:
        raise _wrong(field, found, expected)


def _enum(field: str, value: Any, kind: type[Enum]) -> None:
    _require(isinstance(value, kind), field, value, " or ".join(str(member.value) for member in kind))


def _whole(field: str, value: Any, least: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _require(is_whole and value >= least, field, value, f"a whole number of at least {least}")


def _finite(field: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number and math.isfinite(value), field, value, "a finite number")


def _positive(field: str, value: Any) -> None:
    _finite(field, value)
    _require(value > 0, field, value, "a number above 0")
