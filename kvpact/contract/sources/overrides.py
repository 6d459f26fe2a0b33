"""Changes of single config fields, set where the config itself keeps them."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from typing import Any

from kvpact.contract.sources.families import ROPE_KEYS, ROPE_SECTIONS, family_of
from kvpact.contract.sources.rope_settings import TOP_LEVEL_KEYS
from kvpact.errors import BadRequest

WORDS = {"true": True, "false": False, "none": None, "null": None}


def override_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with fields set; text is parsed as a number, flag or JSON where it is one.

    A rotary setting, also written `section.key`, changes wherever the config gives it. A whole new
    rope_scaling or rope_parameters replaces both sections and keeps theta unless it brings its own.

    Raises:
        BadRequest: a field that the model's family doesn't have; names the nearest that it has.
        UnreadableSource: the config's model type isn't known.
    """
    known = family_of(config).known_keys() | set(config)
    changed = copy.deepcopy(dict(config))
    for key, given in overrides.items():
        value = parse_value(given)
        section, dot, inner = key.partition(".")
        rope_key = inner if dot and section in ROPE_SECTIONS else key
        if key in ROPE_SECTIONS:
            _replace_sections(changed, key, value)
        elif rope_key in ROPE_KEYS or rope_key == "type":
            _set_rope_key(changed, "rope_type" if rope_key == "type" else rope_key, value)
        elif key in known:
            changed[key] = value
        else:
            raise _unknown_field(config, key, known)
    return changed


def parse_value(given: Any) -> Any:
    """Text as the JSON value that it spells, or else as it stands; anything but text unchanged."""
    if not isinstance(given, str):
        return given
    word = given.strip().lower()
    if word in WORDS:
        return WORDS[word]
    try:
        return json.loads(given)
    except ValueError:
        return given


def _unknown_field(config: Mapping[str, Any], key: str, known: frozenset[str]) -> BadRequest:
    nearest = difflib.get_close_matches(key, sorted(known | set(ROPE_KEYS)), n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return BadRequest(f"model config field {key} is unknown for {config.get('model_type')}{hint}", param=key)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(config.get(name), dict):
        config[name] = {}
    section: dict[str, Any] = config[name]
    return section


def _set_rope_key(config: dict[str, Any], key: str, value: Any) -> None:
    sections = [config[name] for name in ROPE_SECTIONS if isinstance(config.get(name), dict)]
    holders = [part for part in sections if key in part or (key == "rope_type" and "type" in part)]
    if key in TOP_LEVEL_KEYS and key in config:
        holders.append(config)
    if not holders and key == "rope_theta" and not isinstance(config.get("rope_parameters"), dict):
        holders.append(config)
    for holder in holders or sections[:1] or [_section(config, "rope_parameters")]:
        if key == "rope_type":
            holder.pop("type", None)
        holder[key] = value


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
