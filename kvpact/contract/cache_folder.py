"""Where results that take long are kept: the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """$XDG_CACHE_HOME/kvpact/<kind>, or the same under ~/.cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpact" / kind
