"""Leases and tombstones of handoffs. Pure: time comes in with each call."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpact.handoff.messages import HandoffState
from kvpact.types import HandoffId


class LeaseTable:
    """Until when each handoff lives. All leases are equally long."""

    def __init__(self, lease_s: float) -> None:
        assert lease_s > 0
        self._lease_s = lease_s
        self._expiries: OrderedDict[HandoffId, float] = OrderedDict()

    def renew(self, handoff_id: HandoffId, now: float) -> None:
        """Lets the handoff live for one lease from `now` on, known or not."""
        self._expiries[handoff_id] = now + self._lease_s
        self._expiries.move_to_end(handoff_id)

    def drop(self, handoff_id: HandoffId) -> None:
        """Forgets the handoff. Idempotent."""
        self._expiries.pop(handoff_id, None)

    def expired(self, now: float) -> tuple[HandoffId, ...]:
        """Handoffs whose time is over at `now`, the first to expire first; they stay until dropped."""
        over: list[HandoffId] = []
        for handoff_id, expiry in self._expiries.items():
            if expiry > now:
                break
            over.append(handoff_id)
        return tuple(over)

    def next_expiry(self) -> float | None:
        """When the next lease ends; None without leases."""
        return next(iter(self._expiries.values()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """How a handoff ended."""

    state: HandoffState
    reason: str
    """For people."""


class Graveyard:
    """Handoffs that ended, so that late messages don't bring them back. Bounded in time and number."""

    def __init__(self, *, keep_s: float, most: int) -> None:
        assert keep_s > 0
        assert most > 0
        self._keep_s = keep_s
        self._most = most
        self._stones: OrderedDict[HandoffId, tuple[float, Tombstone]] = OrderedDict()

    def bury(self, handoff_id: HandoffId, stone: Tombstone, now: float) -> None:
        """Remembers how a handoff ended; the last word counts."""
        self._stones[handoff_id] = (now + self._keep_s, stone)
        self._stones.move_to_end(handoff_id)
        while len(self._stones) > self._most or next(iter(self._stones.values()))[0] <= now:
            self._stones.popitem(last=False)

    def find(self, handoff_id: HandoffId, now: float) -> Tombstone | None:
        """How the handoff ended; None if it didn't, or too long ago."""
        forget_at, stone = self._stones.get(handoff_id, (now, None))
        return stone if now < forget_at else None

    def __len__(self) -> int:
        """Tombstones kept."""
        return len(self._stones)
