"""One flat config out of a config.json: the text part, under the family's own names of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.contract.sources.families import family_of
from kvpact.contract.sources.numbers import wrong_value
from kvpact.errors import UnreadableSource

OUTER_KEYS = ("tie_word_embeddings",)
"""Keys that a model with a text part may keep beside it."""


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat copy: text part taken out, aliases renamed, model_type the family's own. Idempotent.

    Raises:
        UnreadableSource: the type isn't known, an alias and its key disagree, or a value isn't served.
    """
    family = family_of(config)
    text = config.get("text_config")
    flat = dict(text) if isinstance(text, Mapping) else dict(config)
    flat["model_type"] = family.model_type
    if isinstance(text, Mapping):
        flat |= {key: config[key] for key in OUTER_KEYS if key in config and key not in flat}
    for alias, key in family.aliases.items():
        if alias not in flat:
            continue
        value = flat.pop(alias)
        if key in flat and flat[key] != value:
            raise UnreadableSource(
                f"{key} is given twice with different values: {key} = {flat[key]!r}, {alias} = {value!r};"
                " keep one",
                source="config",
                key=key,
            )
        flat[key] = value
    for key, served in family.refused.items():
        if key in flat and flat[key] not in served:
            raise wrong_value(key, flat[key], " or ".join(repr(value) for value in served))
    return flat
