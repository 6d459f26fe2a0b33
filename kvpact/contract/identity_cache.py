"""Tensor digests of weight files, kept in the user's cache folder for as long as the files are the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvpact.contract.cache_folder import cache_folder

logger = logging.getLogger(__name__)
FORM = 2
"""Grows when the digests of unchanged files change."""


def cache_entry(files: Sequence[Path], how: Sequence[object]) -> Path:
    """Where the digests of these files, as they are now and taken in the way `how`, are kept.

    A modification time can be set back, by `cp -p` or an archive; the change time and the inode can't.
    """
    key = json.dumps([FORM, [_state(file) for file in files], [str(part) for part in how]])
    return cache_folder("identity") / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _state(file: Path) -> tuple[str, int, int, int, int]:
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def load_digests(entry: Path) -> dict[str, str] | None:
    """Digests by tensor name, or None where there are none or the entry is damaged."""
    try:
        kept = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if (
        not isinstance(kept, dict)
        or set(kept) != {"digests", "check"}
        or not isinstance(kept["digests"], dict)
    ):
        return None
    return kept["digests"] if kept["check"] == _check(kept["digests"]) else None


def store_digests(entry: Path, digests: dict[str, str]) -> None:
    """Keeps digests in one step, so that nobody reads half an entry. A failure is only logged."""
    text = json.dumps({"digests": digests, "check": _check(digests)})
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=entry.parent, prefix=".draft-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(draft, entry)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
    except OSError as error:
        logger.warning("can't keep weight digests in %s: %s", entry.parent, error)


def _check(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
