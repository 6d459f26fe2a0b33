"""Changes of single config fields, set where the config itself keeps them."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from typing import Any

from kvpact.contract.json_file import DEEPEST, is_too_deep
from kvpact.contract.sources.families import ROPE_KEYS, ROPE_SECTIONS, family_of
from kvpact.contract.sources.family import Family
from kvpact.contract.sources.rope_settings import LAYER_TYPES, ROPE_ALIASES, TOP_LEVEL_KEYS
from kvpact.errors import BadRequest

WORDS = {"true": True, "false": False, "none": None, "null": None}


def override_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with fields set; text is parsed as a number, flag or JSON where it is one.

    Fields are those of the text part where there is one. A rotary setting, also written `section.key` or
    `section.layer_type.key`, changes wherever the config gives it, under whatever name. A whole new
    rope_scaling or rope_parameters replaces both sections and keeps theta unless it brings its own.

    Raises:
        BadRequest: a field that the model's family doesn't have (names the nearest that it has), or a
            rotary setting of a config that has one per layer type.
        UnreadableSource: the config's model type isn't known.
    """
    family = family_of(config)
    changed = copy.deepcopy(dict(config))
    text = changed.get("text_config")
    fields = text if isinstance(text, dict) else changed
    known = family.known_keys() | set(fields)
    for key, given in overrides.items():
        value = parse_value(given)
        section, dot, inner = key.partition(".")
        rope_key = inner if dot and section in ROPE_SECTIONS else key
        layer_type, dot, innermost = rope_key.partition(".")
        canonical = ROPE_ALIASES.get(rope_key, rope_key)
        if key in ROPE_SECTIONS:
            _replace_sections(fields, key, value)
        elif layer_type in LAYER_TYPES and dot and family.rope_by_layer_type:
            _set_by_layer_type(fields, section, layer_type, innermost, value)
        elif canonical in ROPE_KEYS:
            _set_rope_key(fields, family, canonical, value)
        elif key in known:
            _set_field(fields, family, key, value)
        else:
            raise _unknown_field(family, key, known)
    return changed


def parse_value(given: Any) -> Any:
    """Text as the JSON value that it spells, or else as it stands; anything but text unchanged.

    Raises:
        BadRequest: values that lie too deep in each other.
    """
    if not isinstance(given, str):
        return given
    word = given.strip().lower()
    if word in WORDS:
        return WORDS[word]
    try:
        value = json.loads(given)
    except ValueError:
        return given
    except RecursionError as error:
        raise _too_deep(given) from error
    if is_too_deep(value):
        raise _too_deep(given)
    return value


def _too_deep(given: str) -> BadRequest:
    return BadRequest(f"{given[:40]}...: nests values more than {DEEPEST} deep")


def _unknown_field(family: Family, key: str, known: frozenset[str]) -> BadRequest:
    nearest = difflib.get_close_matches(key, sorted(known | set(ROPE_KEYS)), n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; expected one of its config.json, or rope_theta"
    return BadRequest(f"model config field {key} is unknown for {family.model_type}{hint}", param=key)


def _set_field(fields: dict[str, Any], family: Family, key: str, value: Any) -> None:
    """Sets a field under the name that the config uses for it."""
    canonical = family.aliases.get(key, key)
    spellings = [canonical, *(alias for alias, target in family.aliases.items() if target == canonical)]
    for name in [name for name in spellings if name in fields] or [key]:
        fields[name] = value


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(config.get(name), dict):
        config[name] = {}
    section: dict[str, Any] = config[name]
    return section


def _set_by_layer_type(fields: dict[str, Any], section: str, layer_type: str, key: str, value: Any) -> None:
    part = _section(_section(fields, section if section in ROPE_SECTIONS else "rope_parameters"), layer_type)
    part.pop("type" if key == "rope_type" else "", None)
    part[ROPE_ALIASES.get(key, key)] = value


def _set_rope_key(fields: dict[str, Any], family: Family, key: str, value: Any) -> None:
    names = {key, *(alias for alias, canonical in ROPE_ALIASES.items() if canonical == key)}
    sections = [fields[name] for name in ROPE_SECTIONS if isinstance(fields.get(name), dict)]
    if any(layer_type in part for part in sections for layer_type in LAYER_TYPES):
        raise BadRequest(
            f"{key}: this config has one for each layer type; write rope_parameters.{LAYER_TYPES[0]}.{key}",
            param=key,
        )
    holders = [part for part in sections if names & set(part)]
    if names & set(fields) and key != "rope_type":
        holders.append(fields)
    at_top = key == "rope_theta" and not isinstance(fields.get("rope_parameters"), dict)
    if not holders and (at_top or (key in TOP_LEVEL_KEYS and family.rope_by_layer_type)):
        holders.append(fields)
    for holder in holders or sections[:1] or [_section(fields, "rope_parameters")]:
        if key == "rope_type":
            holder.pop("type", None)
        present = names & set(holder)
        holder.update(dict.fromkeys(present or {key}, value))


def _replace_sections(config: dict[str, Any], key: str, value: Any) -> None:
    thetas = [
        config[name]["rope_theta"]
        for name in ROPE_SECTIONS
        if isinstance(config.get(name), dict) and "rope_theta" in config[name]
    ]
    for name in ROPE_SECTIONS:
        config.pop(name, None)
    config[key] = value
    brings_theta = isinstance(value, dict) and "rope_theta" in value
    if brings_theta:
        config.pop("rope_theta", None)
    elif thetas:
        config.setdefault("rope_theta", thetas[0])
