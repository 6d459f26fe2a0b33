"""docs/settings.md has every key of a deployment's settings once, with the default that the code has."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from kvpact.config import Config
from tests.repo.tree import ROOT

ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| (.+) \|$", re.MULTILINE)


def settings(part: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that has a value of its own, with its default."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_documented(value: Any) -> str:
    """A default as the table writes it."""
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def documented() -> list[tuple[str, str]]:
    """Key and default of each row; a row may have one key for each side."""
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    return [(key, default) for keys, default, _ in ROW.findall(text) for key in re.findall(r"`(.+?)`", keys)]


def test_every_setting_is_documented_with_its_default() -> None:
    expected = [(key, as_documented(value)) for key, value in settings(Config())]
    assert sorted(documented()) == sorted(expected)
