"""Sources of time and randomness; everything else takes them as arguments."""

from __future__ import annotations

import secrets
import time
from typing import Protocol

from kvpact.types import HandoffId


class Clock(Protocol):
    """Monotonic seconds of one process."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""


class MonotonicClock:
    """The process's own clock."""

    def now(self) -> float:
        """Seconds of time.monotonic."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and replays."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds set so far."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` >= 0."""
        assert seconds >= 0
        self._now_s += seconds


def new_incarnation() -> bytes:
    """16 random bytes that name one life of a process."""
    return secrets.token_bytes(16)


def new_handoff_id() -> HandoffId:
    """128 random bits that name one handoff."""
    return HandoffId(secrets.token_bytes(16))


def new_nonce() -> bytes:
    """16 random bytes."""
    return secrets.token_bytes(16)


def wall_time_s() -> int:
    """Seconds since the epoch, for timestamps that people read."""
    return int(time.time())


def wall_time_ms() -> int:
    """Milliseconds since the epoch, for names that sort by time."""
    return time.time_ns() // 1_000_000
