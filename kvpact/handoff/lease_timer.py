"""Wakes the owner of leases when the next one ends; needs no new work and never spins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvpact.clock import Clock


class Alarm(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Takes the call back. Idempotent."""


CallLater = Callable[[float, Callable[[], None]], Alarm]
"""(seconds, callback) -> Alarm."""


def loop_call_later(delay_s: float, callback: Callable[[], None]) -> Alarm:
    """Calls back on the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, callback)


class LeaseTimer:
    """One alarm at most, set for the next lease that ends."""

    def __init__(
        self, *, clock: Clock, on_due: Callable[[], None], call_later: CallLater = loop_call_later
    ) -> None:
        self._clock = clock
        self._on_due = on_due
        self._call_later = call_later
        self._alarm: Alarm | None = None

    def arm(self, due: float | None) -> None:
        """Sets the alarm for clock time `due` unless one is set; one that rings early finds nothing to do."""
        if self._alarm is None and due is not None:
            self._alarm = self._call_later(max(0.0, due - self._clock.now()), self._ring)

    def close(self) -> None:
        """Takes the alarm back. Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        self._on_due()
