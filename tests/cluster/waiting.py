"""Waiting for another process, by asking it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 60.0


def eventually(holds: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Asks until `holds` gives something true, and gives that back."""
    end_s = time.monotonic() + deadline_s
    while not (found := holds()):
        assert time.monotonic() < end_s, f"not within {deadline_s} s"
        threading.Event().wait(0.1)
    return found
