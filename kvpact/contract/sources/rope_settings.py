"""One meaning out of every spelling of rotary settings in a config.json.

Settings lie at the top level, in `rope_scaling` (older files) or in `rope_parameters`, flat or by layer type;
the type is spelled `type` or `rope_type`. The same key in two places must have one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvpact.contract.rope import KNOWN_ROPE_TYPES, RopeParameters
from kvpact.contract.sources.families import ROPE_KEYS, ROPE_SECTIONS
from kvpact.contract.sources.family import Family
from kvpact.contract.sources.numbers import positive_int, positive_number, wrong_value
from kvpact.contract.sources.rope_types import scaling_of
from kvpact.errors import UnreadableSource

TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "rotary_dim")
ROPE_ALIASES = {"type": "rope_type", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
LOCAL_THETA = "rope_local_base_freq"
Spelling = tuple[str, str, Any]
"""Place, canonical key, value."""


def rope_settings(config: Mapping[str, Any], family: Family, layer_type: str) -> dict[str, Any]:
    """Settings of the layers of one type under canonical keys, `rope_type` and `rope_theta` among them.

    `config` is a canonical one.

    Raises:
        UnreadableSource: two places disagree, the type is unknown, or settings lie where nothing reads them.
    """
    found: dict[str, tuple[str, Any]] = {}
    for place, key, value in _spellings(config, family, layer_type):
        if key == "rope_type" and isinstance(value, str):
            value = family.rope_type_names.get(value, value)
        if key in found and found[key][1] != value:
            other_place, other_value = found[key]
            raise UnreadableSource(
                f"{key} is given twice with different values: {other_place} = {other_value!r},"
                f" {place} = {value!r}; keep one",
                source="config",
                key=key,
            )
        found.setdefault(key, (place, value))
    settings = {key: value for key, (_, value) in found.items()}
    default = LOCAL_THETA if family.rope_by_layer_type and layer_type == SLIDING else "rope_theta"
    settings.setdefault("rope_theta", family.defaults[default])
    settings["rope_theta"] = _theta(config, family, settings["rope_theta"])
    settings["rope_type"] = _rope_type(settings, family)
    return settings


def rope_parameters_of(
    config: Mapping[str, Any], family: Family, settings: Mapping[str, Any], lanes: int
) -> RopeParameters:
    """What the tables are made from, for heads of which `lanes` lanes may turn.

    Raises:
        UnreadableSource: a number is absent or out of range, or an odd number of lanes would turn.
    """
    rope_type = settings["rope_type"]
    rotary_dim = lanes if rope_type == "proportional" else _rotary_dim(settings, family, lanes)
    context = positive_int("max_position_embeddings", family.value(config, "max_position_embeddings"))
    return RopeParameters(
        theta=settings["rope_theta"],
        rotary_dim=rotary_dim,
        scaling=scaling_of(settings, rotary_dim=rotary_dim, context_tokens=context),
    )


def unknown_rope_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the rotary sections that nothing reads, with their section."""
    known = {*ROPE_KEYS, *ROPE_ALIASES, "rotary_dim", "max_position_embeddings"}
    unknown = []
    for name in ROPE_SECTIONS:
        section = config.get(name)
        parts = {name: section} if isinstance(section, Mapping) else {}
        for layer_type in LAYER_TYPES:
            inner = parts[name].get(layer_type) if parts else None
            if isinstance(inner, Mapping):
                parts[f"{name}.{layer_type}"] = inner
        unknown += [
            f"{place}.{key}"
            for place, part in parts.items()
            for key in sorted(part)
            if key not in known and key not in LAYER_TYPES
        ]
    return tuple(unknown)


def _spellings(config: Mapping[str, Any], family: Family, layer_type: str) -> Iterator[Spelling]:
    """Every rotary setting of the layers of one type, under its canonical key."""
    yield from _top_level(config, family, layer_type)
    sections = {name: config[name] for name in ROPE_SECTIONS if config.get(name) is not None}
    if not sections and family.default_rope is not None:
        sections = {f"{family.model_type}'s own default": family.default_rope}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise wrong_value(name, section, "an object of rotary settings")
        for place, part in _parts(name, section, family, layer_type):
            for key, value in part.items():
                yield f"{place}.{key}", ROPE_ALIASES.get(key, key), value


def _top_level(config: Mapping[str, Any], family: Family, layer_type: str) -> Iterator[Spelling]:
    original = "original_max_position_embeddings"
    if family.rope_by_layer_type and original in config:
        raise wrong_value(original, config[original], f"it under rope_parameters.{FULL} for this family")
    local = family.rope_by_layer_type and layer_type == SLIDING
    if local and LOCAL_THETA in config:
        yield LOCAL_THETA, "rope_theta", config[LOCAL_THETA]
    for key in (*TOP_LEVEL_KEYS, *ROPE_ALIASES):
        canonical = ROPE_ALIASES.get(key, key)
        if key in config and key != "type" and not (local and canonical == "rope_theta"):
            yield key, canonical, config[key]
    if original in family.defaults and original not in config:
        yield f"{family.model_type}'s own default", original, family.defaults[original]


def _parts(
    name: str, section: Mapping[str, Any], family: Family, layer_type: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Settings of one section that concern the layers of one type, each with its place."""
    nested = [key for key in section if key in LAYER_TYPES]
    if nested and not family.rope_by_layer_type:
        key = f"{name}.{nested[0]}"
        raise wrong_value(key, section[nested[0]], "one set of settings for all layers of this family")
    if not family.rope_by_layer_type:
        yield name, section
        return
    if not nested:
        if name == "rope_parameters" and section:
            raise wrong_value(name, dict(section), f"settings under {FULL} and {SLIDING}")
        if layer_type == FULL:
            yield name, section
        return
    stray = next((key for key in section if key not in LAYER_TYPES), None)
    if stray is not None:
        raise wrong_value(f"{name}.{stray}", section[stray], f"nothing beside {FULL} and {SLIDING}")
    part = section.get(layer_type)
    if part is not None and not isinstance(part, Mapping):
        raise wrong_value(f"{name}.{layer_type}", part, "an object of rotary settings")
    if part is not None and part.get("truncate", True) is not True:
        raise wrong_value(f"{name}.{layer_type}.truncate", part["truncate"], "true or none per layer type")
    yield f"{name}.{layer_type}", part or {}


def _theta(config: Mapping[str, Any], family: Family, value: Any) -> float:
    theta = positive_number("rope_theta", value)
    if family.refused.get("rope_theta", (theta,))[0] != theta:
        raise wrong_value("rope_theta", value, f"{family.refused['rope_theta'][0]!r}")
    if "rope_ratio" in family.defaults:
        ratio = positive_number("rope_ratio", family.value(config, "rope_ratio"))
        theta = positive_number("rope_theta * rope_ratio", theta * ratio)
    return theta


def _rope_type(settings: Mapping[str, Any], family: Family) -> str:
    rope_type = settings.get("rope_type", "default")
    known = ", ".join(KNOWN_ROPE_TYPES)
    if rope_type not in family.rope_types:
        raise UnreadableSource(
            f"rope_type {rope_type!r} isn't known for {family.model_type}; known are"
            f" {', '.join(sorted({*family.rope_types, *family.rope_type_names}))}",
            source="config",
            key="rope_type",
        )
    if "rope_type" not in settings and "factor" in settings:
        raise wrong_value("rope_type", None, f"one of {known}, since factor is given")
    return str(rope_type)


def _rotary_dim(settings: Mapping[str, Any], family: Family, lanes: int) -> int:
    """Lanes that turn: rotary_dim, a share of the head's, or the family's own share; the first two agree."""
    given = settings.get("rotary_dim")
    share = settings.get("partial_rotary_factor")
    rotary_dim = None if given is None else positive_int("rotary_dim", given)
    if share is None and rotary_dim is None:
        if family.rotary_dim_is_required:
            raise wrong_value("rotary_dim", None, "the number of lanes that turn")
        share = 1.0 if family.partial_rotation is None else family.partial_rotation
    key = "rotary_dim"
    if share is not None:
        key = "partial_rotary_factor"
        shared = int(lanes * positive_number(key, share))
        if rotary_dim is not None and rotary_dim != shared:
            raise wrong_value(
                "rotary_dim", rotary_dim, f"{shared}, since {key} is {share!r} of {lanes} lanes"
            )
        rotary_dim = shared
    assert rotary_dim is not None
    found = share if key == "partial_rotary_factor" else rotary_dim
    if family.partial_rotation is None and rotary_dim != lanes:
        raise wrong_value(key, found, f"1 or none, since {family.model_type} rotates whole heads")
    if rotary_dim % 2 or not 2 <= rotary_dim <= lanes:
        raise wrong_value(key, found, f"an even number of lanes from 2 to {lanes}, not {rotary_dim}")
    return rotary_dim
