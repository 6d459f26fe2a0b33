"""One meaning out of every spelling of rotary settings in a config.json.

Settings lie at the top level, in `rope_scaling` (older files) or in `rope_parameters`; the type is spelled
`type` or `rope_type`. The same key in two places must have one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.contract.rope import KNOWN_ROPE_TYPES, Llama3Scaling, RopeParameters
from kvpact.contract.sources.families import ROPE_KEYS, ROPE_SECTIONS, Family
from kvpact.contract.sources.numbers import positive_int, positive_number, wrong_value
from kvpact.errors import UnreadableSource

TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
KNOWN = ", ".join(KNOWN_ROPE_TYPES)
LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_parameters_of(config: Mapping[str, Any], family: Family, rotary_dim: int) -> RopeParameters:
    """What the table is made from.

    Raises:
        UnreadableSource: two places disagree, the type is unknown, or a number is absent or out of range.
    """
    settings = _merged(config)
    theta = positive_number("rope_theta", settings.get("rope_theta", family.defaults["rope_theta"]))
    _refuse_partial_rotation(settings, family)
    rope_type = settings.get("rope_type", "default")
    if rope_type == "default":
        if "rope_type" not in settings and "factor" in settings:
            raise wrong_value(
                "rope_type", None, f"one of {', '.join(KNOWN_ROPE_TYPES)}, since factor is given"
            )
        return RopeParameters(theta=theta, rotary_dim=rotary_dim)
    if rope_type == "llama3":
        context = family.value(config, "max_position_embeddings")
        return RopeParameters(theta=theta, rotary_dim=rotary_dim, scaling=_llama3(settings, context))
    raise UnreadableSource(
        f"rope_type {rope_type!r} isn't known for {family.model_type}; known are {KNOWN}",
        source="config",
        key="rope_type",
    )


def unknown_rope_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the rotary sections that nothing reads, with their section."""
    known = {*ROPE_KEYS, "type"}
    sections = ((name, config.get(name)) for name in ROPE_SECTIONS)
    return tuple(
        f"{name}.{key}"
        for name, section in sections
        if isinstance(section, Mapping)
        for key in sorted(section)
        if key not in known
    )


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for place, key, value in _spellings(config):
        if key in found and found[key][1] != value:
            other_place, other_value = found[key]
            raise UnreadableSource(
                f"{key} is given twice with different values: {other_place} = {other_value!r},"
                f" {place} = {value!r}; keep one",
                source="config",
                key=key,
            )
        found.setdefault(key, (place, value))
    return {key: value for key, (_, value) in found.items()}


def _spellings(config: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Every rotary setting as (place, canonical key, value)."""
    spellings = [(key, key, config[key]) for key in TOP_LEVEL_KEYS if key in config]
    for name in ROPE_SECTIONS:
        section = config.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise wrong_value(name, section, "an object of rotary settings")
        for key, value in section.items():
            if key in LAYER_TYPES:
                raise wrong_value(f"{name}.{key}", value, "one set of settings for all layers of this family")
            spellings.append((f"{name}.{key}", "rope_type" if key == "type" else key, value))
    return spellings


def _refuse_partial_rotation(settings: Mapping[str, Any], family: Family) -> None:
    factor = settings.get("partial_rotary_factor")
    if factor is not None and factor != 1:
        raise wrong_value(
            "partial_rotary_factor", factor, f"1 or none, since {family.model_type} rotates whole heads"
        )


def _llama3(settings: Mapping[str, Any], context_tokens: Any) -> Llama3Scaling:
    low = positive_number("low_freq_factor", settings.get("low_freq_factor"))
    high = positive_number("high_freq_factor", settings.get("high_freq_factor"))
    factor = positive_number("factor", settings.get("factor"))
    if high <= low:
        raise wrong_value("high_freq_factor", high, f"more than low_freq_factor, which is {low!r}")
    if factor < 1:
        raise wrong_value("factor", factor, "a number of at least 1")
    key = "original_max_position_embeddings"
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=positive_int(key, settings.get(key, context_tokens)),
    )
