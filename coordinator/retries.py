"""Whether a request that failed goes on elsewhere, and where it no longer goes. Values in, values out."""

from __future__ import annotations

from coordinator.registry import PairKey, Snapshot
from coordinator.router import OnDecode, OnPair, OnPrefill, Placement
from kvpact.errors import (
    ContractRefused,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    Unavailable,
    UnknownHandoff,
)
from kvpact.types import WorkerLife

ELSEWHERE = (Unavailable, Fenced, DataLoss, UnknownHandoff, ContractRefused, Exhausted)
"""Failures of workers, not of the request: another attempt may work."""
CORRUPTING = (DataLoss, ContractRefused)
"""Of these, the failures that put the cache itself in doubt."""
AT_ONCE = (*CORRUPTING, Exhausted)
"""Of these, the failures that waiting for workers to come back doesn't mend."""


class Retries:
    """What one request went through so far.

    It is tried again once without a new token in between. After a failure that puts a cache in doubt it keeps
    away from that pair and is tried once more in all; after a full worker it asks another decode worker.
    """

    def __init__(self) -> None:
        self.failure: KvpactError | None = None
        """The last one."""
        self._barred: set[PairKey] = set()
        self._full: set[WorkerLife] = set()
        self._may_retry = True

    def progressed(self) -> None:
        """A token came."""
        self._may_retry = True
        self._full.clear()

    def failed(self, placement: Placement, error: KvpactError) -> bool:
        """Takes a failure in; whether the request may be tried again."""
        key = placement.key()
        may_retry = self._may_retry and not (isinstance(error, CORRUPTING) and self._barred)
        if key is not None and isinstance(error, CORRUPTING):
            self._barred.add(key)
        if isinstance(error, Exhausted):
            match placement:
                case OnPair(decode=decode) | OnDecode(decode=decode):
                    self._full.add(decode.life)
                case OnPrefill():
                    may_retry = False  # no decode worker is full, and no other one would help
        self.failure = error
        self._may_retry = False
        return may_retry

    def barred(self, snapshot: Snapshot) -> set[PairKey]:
        """Pairs that it keeps away from."""
        return self._barred | {pair.key for pair in snapshot.pairs if pair.key.decode in self._full}

    def may_wait(self) -> bool:
        """Whether workers that come back could mend the last failure."""
        return not isinstance(self.failure, AT_ONCE)
