"""JSON files of others, read within bounds: their size, and how deep values lie in each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpact.errors import UnreadableSource

CONFIG_CAP_BYTES = 32 << 20
"""Largest config, index or contract file; parsed JSON takes some fifty times its size."""
TOKENIZER_CAP_BYTES = 256 << 20
DEEPEST = 64
"""Objects and lists within each other; what copies and compares values recurses that far at most."""


def read_json_object(file: Path, cap_bytes: int = CONFIG_CAP_BYTES) -> dict[str, Any]:
    """The object in a UTF-8 file, with a byte order mark or without.

    Raises:
        UnreadableSource: no such file, more than `cap_bytes`, nested too deep, or not one JSON object.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(cap_bytes + 1)
    except OSError as error:
        raise UnreadableSource(f"can't read {file}: {error}", source=str(file)) from error
    if len(content) > cap_bytes:
        raise UnreadableSource(
            f"{file} has more than {cap_bytes >> 20} MiB, which nothing of its kind needs", source=str(file)
        )
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UnreadableSource(f"can't read {file}: {error}", source=str(file)) from error
    except ValueError as error:
        raise UnreadableSource(f"{file} isn't JSON: {error}", source=str(file)) from error
    except RecursionError as error:
        raise _too_deep(file) from error
    if not isinstance(value, dict):
        raise UnreadableSource(f"{file} holds no JSON object", source=str(file))
    if is_too_deep(value):
        raise _too_deep(file)
    return value


def is_too_deep(value: Any) -> bool:
    """Whether more than DEEPEST objects and lists lie within each other."""
    level = [value]
    for _ in range(DEEPEST):
        inside: list[Any] = []
        for holder in level:
            if isinstance(holder, dict | list):
                inside += holder.values() if isinstance(holder, dict) else holder
        if not inside:
            return False
        level = [each for each in inside if isinstance(each, dict | list)]
    return bool(level)


def _too_deep(file: Path) -> UnreadableSource:
    return UnreadableSource(f"{file} nests values more than {DEEPEST} deep", source=str(file))
