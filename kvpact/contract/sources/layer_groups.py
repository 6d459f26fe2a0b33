"""Layer groups from a canonical config: layers that share every fact, in the order of their first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpact.contract.contract import AttentionTemperature, LatentDims, LayerGroup, Rotary
from kvpact.contract.rope import frequencies_of
from kvpact.contract.rope_scaling import yarn_mscale
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.family import Family, SoftmaxScale, Temperature
from kvpact.contract.sources.heads import Heads, head_dim_of, heads_of
from kvpact.contract.sources.layer_rules import FULL, LayerRule, layer_rules
from kvpact.contract.sources.numbers import positive_int, positive_number, wrong_value
from kvpact.contract.sources.rope_settings import rope_parameters_of, rope_settings
from kvpact.contract.sources.rope_types import ORIGINAL
from kvpact.types import FrequencyPolicy, KeyState, LaneOrder, LayerKind, RotationSite

LLAMA4_TEMPERATURE = "llama4_log1p"
"""Parameters floor_scale, attn_scale: ln(1 + floor((position + 1) / floor_scale)) * attn_scale + 1."""
MINISTRAL3_TEMPERATURE = "ministral3_log"
"""Parameters original context, beta: 1 + beta * ln(1 + floor(position / original context))."""
UNTURNED = Rotary(
    key_state=KeyState.NONE,
    site=RotationSite.WRITER,
    rotary_dim=0,
    lane_offset=0,
    stored_lane_order=LaneOrder.HALF_SPLIT,
    frequency_policy=FrequencyPolicy.FROZEN,
    tables=(),
)
"""Rotation of a layer that never turns its keys, whatever form the cache has."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What the facts of every layer are read from."""

    config: Mapping[str, Any]
    family: Family
    cache: CacheChoice


def layer_groups(config: Mapping[str, Any], family: Family, cache: CacheChoice) -> tuple[LayerGroup, ...]:
    """Groups that cover every layer once. Raises UnreadableSource for a fact that is absent or wrong."""
    source = _Source(config, family, cache)
    members: dict[LayerRule, list[int]] = {}
    for layer, rule in enumerate(layer_rules(config, family)):
        members.setdefault(rule, []).append(layer)
    return tuple(_group(source, rule, tuple(layers)) for rule, layers in members.items())


def _group(source: _Source, rule: LayerRule, layers: tuple[int, ...]) -> LayerGroup:
    config, family = source.config, source.family
    heads = heads_of(config, family, full=rule.layer_type == FULL)
    settings = rope_settings(config, family, rule.layer_type)
    latent = _latent(source)
    kind = rule.kind
    scale = _softmax_scale(config, family, heads, settings)
    if family.latent:
        kind = LayerKind.MLA_EXPANDED
    if latent is not None:
        kind = LayerKind.MLA_LATENT
        width = latent.latent_dim + latent.rope_dim
        heads = Heads(
            kv_heads=1,
            key_dim=width,
            value_dim=latent.latent_dim,
            turning_start=latent.latent_dim,
            turning_end=width,
        )
    return LayerGroup(
        layers=layers,
        kind=kind,
        window=rule.window,
        kv_heads=heads.kv_heads,
        key_dim=heads.key_dim,
        value_dim=heads.value_dim,
        softmax_scale=scale,
        softcap=_softcap(config, family),
        sinks=family.sinks,
        temperature=_temperature(config, family, rule, settings),
        latent=latent,
        rotary=_rotary(source, heads, settings) if rule.rotated else UNTURNED,
    )


def _rotary(source: _Source, heads: Heads, settings: Mapping[str, Any]) -> Rotary:
    cache, family = source.cache, source.family
    lanes = heads.turning_end - heads.turning_start
    parameters = rope_parameters_of(source.config, family, settings, lanes)
    frequencies = frequencies_of(parameters)
    return Rotary(
        key_state=cache.key_state,
        site=RotationSite.READER if cache.key_state is KeyState.RAW else RotationSite.WRITER,
        rotary_dim=parameters.rotary_dim,
        lane_offset=heads.turning_start,
        stored_lane_order=cache.stored_lane_order,
        frequency_policy=frequencies.policy,
        tables=frequencies.tables,
        formula=frequencies.formula,
        mrope_sections=_sections(family, settings, parameters.rotary_dim // 2),
        mrope_interleaved=_interleaved(family, settings),
    )


def _latent(source: _Source) -> LatentDims | None:
    if not (source.family.latent and source.cache.latent):
        return None
    latent_dim = positive_int("kv_lora_rank", source.family.value(source.config, "kv_lora_rank"))
    rope_dim = head_dim_of(source.config, source.family)
    return LatentDims(latent_dim=latent_dim, rope_dim=rope_dim, content_first=True)


def _softmax_scale(
    config: Mapping[str, Any], family: Family, heads: Heads, settings: Mapping[str, Any]
) -> float:
    match family.softmax_scale:
        case SoftmaxScale.ONE:
            return 1.0
        case SoftmaxScale.QUERY_SCALAR:
            key = "query_pre_attn_scalar"
            return float(positive_number(key, family.value(config, key)) ** -0.5)
        case SoftmaxScale.MULTIPLIER:
            key = "attention_multiplier"
            return positive_number(key, family.value(config, key))
        case SoftmaxScale.LATENT:
            return float(heads.key_dim**-0.5 * _yarn_weight(settings) * _yarn_weight(settings))
        case SoftmaxScale.HEAD_DIM:
            return float(heads.key_dim**-0.5)


def _yarn_weight(settings: Mapping[str, Any]) -> float:
    """Weight of mscale_all_dim, which multi-head latent attention puts on queries and on keys."""
    weight = settings.get("mscale_all_dim")
    if settings["rope_type"] == "default" or not weight:
        return 1.0
    factor = positive_number("factor", settings.get("factor"))
    return yarn_mscale(factor, positive_number("mscale_all_dim", weight))


def _softcap(config: Mapping[str, Any], family: Family) -> float | None:
    value = None if family.softcap_key is None else family.value(config, family.softcap_key)
    return None if value is None else positive_number(str(family.softcap_key), value)


def _temperature(
    config: Mapping[str, Any], family: Family, rule: LayerRule, settings: Mapping[str, Any]
) -> AttentionTemperature | None:
    if family.temperature is Temperature.LLAMA4:
        tuned = family.value(config, "attn_temperature_tuning")
        if not isinstance(tuned, bool | int):
            raise wrong_value("attn_temperature_tuning", tuned, "true, false or a number")
        if rule.rotated or not tuned:
            return None
        keys = ("floor_scale", "attn_scale")
        numbers = tuple(positive_number(key, family.value(config, key)) for key in keys)
        return AttentionTemperature(formula=LLAMA4_TEMPERATURE, parameters=numbers)
    if family.temperature is Temperature.MINISTRAL3:
        numbers = tuple(positive_number(key, settings.get(key)) for key in (ORIGINAL, "llama_4_scaling_beta"))
        return AttentionTemperature(formula=MINISTRAL3_TEMPERATURE, parameters=numbers)
    return None


def _sections(family: Family, settings: Mapping[str, Any], frequencies: int) -> tuple[int, ...]:
    if not family.mrope_sections:
        return ()
    given = settings.get("mrope_section", list(family.mrope_sections))
    if not isinstance(given, list) or len(given) != len(family.mrope_sections):
        raise wrong_value("mrope_section", given, f"a list of {len(family.mrope_sections)} sizes")
    sections = tuple(positive_int("mrope_section", size) for size in given)
    if sum(sections) != frequencies:
        raise wrong_value("mrope_section", given, f"sizes of {frequencies} frequencies in all")
    return sections


def _interleaved(family: Family, settings: Mapping[str, Any]) -> bool:
    given = settings.get("mrope_interleaved", family.mrope_interleaved)
    if family.mrope_sections and given is not family.mrope_interleaved:
        raise wrong_value("mrope_interleaved", given, f"{family.mrope_interleaved} for {family.model_type}")
    return family.mrope_interleaved
