"""Soft state of the cluster: which workers live, what they carry, and which pairs agreed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from coordinator.ports import RegisteredWorker
from kvpact.handoff.transport_choice import TransportChoice
from kvpact.types import Role, Verdict, VerdictWord, WorkerCounters, WorkerLife, WorkerLoad

NO_WORK = WorkerCounters()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A living worker and its load. `assigned` counts the running requests that it got from here."""

    worker: RegisteredWorker
    load: WorkerLoad
    assigned: int
    last_seen_s: float
    counters: WorkerCounters = NO_WORK
    """Work of its life, as it said last."""


@dataclass(frozen=True, slots=True)
class PairKey:
    """One prefill life and one decode life."""

    prefill: WorkerLife
    decode: WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class PairState:
    """What is known of a pair. No verdict: not paired yet, or set aside; `trouble` says why, if known."""

    key: PairKey
    verdict: Verdict | None = None
    trouble: str | None = None
    quarantine_end_s: float | None = None
    """When it may be paired anew after its data failed a check. None: as soon as possible."""
    transport: TransportChoice | None = None
    """How payloads travel; None without a verdict that lets any."""

    def word(self) -> str:
        """Verdict's word, `quarantined` or `pending`."""
        if self.verdict is not None:
            return self.verdict.word.value
        return "pending" if self.quarantine_end_s is None else "quarantined"

    def settled(self) -> bool:
        """Whether it was tried: it has a verdict, or its data failed a check."""
        return self.word() != "pending"

    def usable(self) -> bool:
        """Whether a request may be routed to it."""
        return self.verdict is not None and self.verdict.word is not VerdictWord.REJECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment."""

    workers: tuple[WorkerState, ...]
    pairs: tuple[PairState, ...]

    def of_role(self, role: Role) -> list[WorkerState]:
        """Workers of one role that take new work."""
        return [state for state in self.workers if state.worker.role is role and not state.load.draining]

    def draining(self) -> set[WorkerLife]:
        """Workers that finish what they have."""
        return {state.worker.life for state in self.workers if state.load.draining}


@dataclass(slots=True)
class Registry:
    """Keeps one life per worker name. Pure: times come in, what changed comes out."""

    _workers: dict[str, WorkerState] = field(default_factory=dict)
    _pairs: dict[PairKey, PairState] = field(default_factory=dict)

    def register(self, worker: RegisteredWorker, load: WorkerLoad, now: float) -> RegisteredWorker | None:
        """Makes a worker known; gives what was known under its name and is replaced, if anything is.

        A worker that registers again as it was keeps its pairs. Another life, endpoint, role or contract is
        paired anew.
        """
        known = self._workers.get(worker.life.worker)
        if known is not None and known.worker == worker:
            self._workers[worker.life.worker] = replace(known, load=load, last_seen_s=now)
            return None
        assigned = known.assigned if known is not None and known.worker.life == worker.life else 0
        if known is not None:
            self._forget(known.worker)
        self._workers[worker.life.worker] = WorkerState(
            worker=worker, load=load, assigned=assigned, last_seen_s=now
        )
        for key in self._new_keys(worker):
            self._pairs[key] = PairState(key=key)
        return known.worker if known is not None else None

    def has_room(self, worker: RegisteredWorker, most: int) -> bool:
        """Whether a worker may be added, so that no more than `most` names are known."""
        return len(self._workers) < most or worker.life.worker in self._workers

    def heartbeat(
        self, life: WorkerLife, load: WorkerLoad, now: float, counters: WorkerCounters = NO_WORK
    ) -> bool:
        """Takes a sign of life; false where this life isn't known. A draining worker drains to its end."""
        known = self.find(life)
        if known is None:
            return False
        load = replace(load, draining=load.draining or known.load.draining)
        self._workers[life.worker] = replace(known, load=load, counters=counters, last_seen_s=now)
        return True

    def set_draining(self, life: WorkerLife, draining: bool) -> bool:
        """Notes whether a worker takes new work; whether that is news."""
        known = self.find(life)
        if known is None or known.load.draining == draining:
            return False
        self._workers[life.worker] = replace(known, load=replace(known.load, draining=draining))
        return True

    def expire(self, before_s: float) -> list[RegisteredWorker]:
        """Forgets workers last seen before `before_s`, and gives them."""
        silent = [state.worker for state in self._workers.values() if state.last_seen_s < before_s]
        for worker in silent:
            self._forget(worker)
        return silent

    def forget(self, life: WorkerLife) -> bool:
        """Drops a worker and its pairs; false where this life isn't known."""
        known = self.find(life)
        if known is not None:
            self._forget(known.worker)
        return known is not None

    def record_verdict(
        self, key: PairKey, verdict: Verdict, transport: TransportChoice | None = None
    ) -> None:
        """Keeps what a pair agreed on; nothing happens if one of the two is gone."""
        if key in self._pairs:
            self._pairs[key] = PairState(key=key, verdict=verdict, transport=transport)

    def set_aside(self, key: PairKey, trouble: str) -> bool:
        """Takes a pair out of use until its next verdict; false if it is unknown. A quarantine stays."""
        if key not in self._pairs:
            return False
        self._pairs[key] = replace(self._pairs[key], verdict=None, transport=None, trouble=trouble)
        return True

    def quarantine(self, key: PairKey, trouble: str, end_s: float) -> bool:
        """Takes a pair out of use and keeps it from being paired before `end_s`; false if it is unknown."""
        if key not in self._pairs:
            return False
        self._pairs[key] = PairState(key=key, trouble=trouble, quarantine_end_s=end_s)
        return True

    def assign(self, lives: Iterable[WorkerLife], change: int) -> None:
        """Adds `change` to the requests that these workers hold."""
        for life in lives:
            known = self.find(life)
            if known is not None:
                self._workers[life.worker] = replace(known, assigned=known.assigned + change)

    def find(self, life: WorkerLife) -> WorkerState | None:
        """The worker of this very life."""
        known = self._workers.get(life.worker)
        return known if known is not None and known.worker.life == life else None

    def unpaired(self, now: float) -> list[PairKey]:
        """Pairs that wait for a verdict and may be paired."""
        return [key for key in self._pairs if self.is_due(key, now)]

    def is_due(self, key: PairKey, now: float) -> bool:
        """Whether both workers live and take work, and their pair has no verdict and isn't in quarantine."""
        pair = self._pairs.get(key)
        if pair is None or pair.verdict is not None:
            return False
        if any(self._workers[life.worker].load.draining for life in (key.prefill, key.decode)):
            return False
        return pair.quarantine_end_s is None or pair.quarantine_end_s <= now

    def snapshot(self) -> Snapshot:
        """All workers and pairs now."""
        return Snapshot(workers=tuple(self._workers.values()), pairs=tuple(self._pairs.values()))

    def _new_keys(self, worker: RegisteredWorker) -> list[PairKey]:
        others = [state.worker for state in self._workers.values() if state.worker.role is not worker.role]
        if worker.role is Role.PREFILL:
            return [PairKey(worker.life, other.life) for other in others]
        return [PairKey(other.life, worker.life) for other in others]

    def _forget(self, worker: RegisteredWorker) -> None:
        del self._workers[worker.life.worker]
        for key in [key for key in self._pairs if worker.life in (key.prefill, key.decode)]:
            del self._pairs[key]
