"""Whether a contract is whole: every enum set, every number there and in range, every layer covered once."""

from __future__ import annotations

import numpy as np

from kvpact.contract.contract import Contract, LayerGroup, Rotary, RotaryTable
from kvpact.contract.field_checks import (
    require,
    require_enum,
    require_finite,
    require_positive,
    require_size,
    require_whole,
    wrong,
)
from kvpact.contract.validate_layout import check_layout
from kvpact.types import (
    Basis,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    RotationSite,
)

DIGEST_BYTES = 32
MOST_HEADS = 4096
"""Far beyond any model; comparing shards goes through them one by one."""
WIDEST_ROW = 1 << 20
MOST_LAYERS = 1024
MOST_LENGTHS = 64
"""Lengths at which tables change; a pair is judged anew at each."""


def validate_contract(contract: Contract) -> None:
    """Gives nothing back for a whole contract.

    Raises:
        BadRequest: names the first field that is unset, absent or out of range, and what was found.
    """
    require_whole("schema_major", contract.schema.major, 1)
    require_whole("schema_minor", contract.schema.minor, 0)
    model = contract.model
    require(bool(model.architecture), "architecture", model.architecture, "a model type")
    for name in ("function_digest", "lm_head_digest", "tokenizer_digest"):
        digest = getattr(model, name)
        require(digest is None or len(digest) == DIGEST_BYTES, name, digest, f"{DIGEST_BYTES} bytes or none")
    require_enum("compute_dtype", model.compute_dtype, Dtype)
    require_whole("context_tokens", model.context_tokens, 1)
    for group in contract.layer_groups:
        _check_group(group)
    _check_coverage(contract)
    check_layout(contract)


def _check_coverage(contract: Contract) -> None:
    layers = sorted(layer for group in contract.layer_groups for layer in group.layers)
    require(bool(layers), "layers", layers, "at least one layer")
    require(len(layers) <= MOST_LAYERS, "layers", f"{len(layers)} layers", f"at most {MOST_LAYERS}")
    lengths = {table.upper_length for group in contract.layer_groups for table in group.rotary.tables}
    found, expected = f"{len(lengths)} lengths", f"at most {MOST_LENGTHS} of them"
    require(len(lengths) <= MOST_LENGTHS, "upper_length", found, expected)
    require(layers == list(range(len(layers))), "layers", layers, "each layer from 0 on exactly once")


def _check_group(group: LayerGroup) -> None:
    require(bool(group.layers), "layers", group.layers, "at least one layer in each group")
    for layer in group.layers:
        require_whole("layers", layer, 0)
    require_enum("kind", group.kind, LayerKind)
    if group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
        require_whole("window", group.window, 1)
    else:
        require(group.window is None, "window", group.window, f"none for kind {group.kind}")
    require_size("kv_heads", group.kv_heads, MOST_HEADS)
    require_size("key_dim", group.key_dim, WIDEST_ROW)
    require_size("value_dim", group.value_dim, WIDEST_ROW)
    require_positive("softmax_scale", group.softmax_scale)
    if group.softcap is not None:
        require_positive("softcap", group.softcap)
    require(isinstance(group.sinks, bool), "sinks", group.sinks, "true or false")
    if group.temperature is not None:
        require(bool(group.temperature.formula), "temperature", group.temperature.formula, "a formula's name")
        for parameter in group.temperature.parameters:
            require_finite("temperature", parameter)
    _check_latent(group)
    _check_rotary(group.rotary, group.key_dim)


def _check_latent(group: LayerGroup) -> None:
    if group.kind is not LayerKind.MLA_LATENT:
        require(group.latent is None, "latent", group.latent, f"none for kind {group.kind}")
        return
    if group.latent is None:
        raise wrong("latent", None, "the dimensions of a latent row")
    require_whole("latent_dim", group.latent.latent_dim, 1)
    require_whole("rope_dim", group.latent.rope_dim, 1)


def _check_rotary(rotary: Rotary, key_dim: int) -> None:
    require_enum("key_state", rotary.key_state, KeyState)
    require_enum("site", rotary.site, RotationSite)
    require_enum("stored_lane_order", rotary.stored_lane_order, LaneOrder)
    require_enum("frequency_policy", rotary.frequency_policy, FrequencyPolicy)
    require_enum("basis", rotary.basis, Basis)
    require_whole("rotary_dim", rotary.rotary_dim, 0)
    require_whole("lane_offset", rotary.lane_offset, 0)
    if rotary.key_state is KeyState.NONE:
        require(rotary.rotary_dim == 0, "rotary_dim", rotary.rotary_dim, "0 for key_state none")
        require(not rotary.tables, "tables", len(rotary.tables), "no table for key_state none")
        return
    require(rotary.rotary_dim >= 2, "rotary_dim", rotary.rotary_dim, "at least 2 unless key_state is none")
    require(rotary.rotary_dim % 2 == 0, "rotary_dim", rotary.rotary_dim, "an even number")
    end = rotary.lane_offset + rotary.rotary_dim
    require(
        end <= key_dim,
        "rotary_dim",
        rotary.rotary_dim,
        f"lanes that end within key_dim {key_dim}, not at {end}",
    )
    _check_tables(rotary)


def _check_tables(rotary: Rotary) -> None:
    require(bool(rotary.tables) or rotary.formula is not None, "inv_freq", (), "at least one table")
    for table in rotary.tables:
        _check_table(table, rotary.rotary_dim)
    uppers = [table.upper_length for table in rotary.tables]
    bounded = [upper for upper in uppers if upper is not None]
    require(None not in uppers[:-1], "upper_length", uppers, "a bound on each table but the last")
    require(bounded == sorted(set(bounded)), "upper_length", uppers, "bounds that grow")
    if rotary.formula is not None:
        require(bool(rotary.formula.name), "formula", rotary.formula.name, "a formula's name")
        for parameter in rotary.formula.parameters:
            require_finite("formula", parameter)
    sections = rotary.mrope_sections
    for section in sections:
        require_whole("mrope_sections", section, 0)
    fits = not sections or sum(sections) == rotary.rotary_dim // 2
    require(fits, "mrope_sections", sections, f"sections of {rotary.rotary_dim // 2} frequencies in all")


def _check_table(table: RotaryTable, rotary_dim: int) -> None:
    found, expected = len(table.inv_freq), rotary_dim // 2
    require(found == expected, "inv_freq", f"{found} numbers", f"{expected} numbers, half of rotary_dim")
    for value in table.inv_freq:
        require_finite("inv_freq", value)
        require(float(np.float32(value)) == value, "inv_freq", value, "a float32 number")
    require_positive("amplitude", table.amplitude)
    if table.upper_length is not None:
        require_whole("upper_length", table.upper_length, 1)
