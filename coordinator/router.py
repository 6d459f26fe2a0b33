"""Which workers a request goes to. Values in, values out."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, PairState, Snapshot, WorkerState
from kvpact.errors import NoCompatiblePair, Unavailable
from kvpact.types import DifferenceAction, Role, Verdict, VerdictWord

_PREFERENCE = {VerdictWord.ACCEPT: 0, VerdictWord.CONVERT: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Workers of one attempt. `decode` None: nothing is handed over."""

    prefill: RegisteredWorker
    decode: RegisteredWorker | None

    def key(self) -> PairKey | None:
        """The pair, where there is one."""
        return PairKey(self.prefill.life, self.decode.life) if self.decode else None


def choose_pair(snapshot: Snapshot, barred: Set[PairKey] = frozenset()) -> Placement:
    """The best usable pair: accept before convert, then least work, then most free blocks on the decode side.

    Raises:
        NoCompatiblePair: every pair was refused; carries the verdict nearest to working.
        Unavailable: a role has no worker, or pairs are not settled yet.
    """
    workers = {state.worker.life: state for role in Role for state in _present(snapshot, role)}
    pairs = [pair for pair in snapshot.pairs if pair.key.prefill in workers and pair.key.decode in workers]
    usable = [pair for pair in pairs if pair.usable() and pair.key not in barred]
    if not usable:
        raise _no_pair(pairs)
    best = min(usable, key=lambda pair: _cost(pair, workers[pair.key.prefill], workers[pair.key.decode]))
    return Placement(prefill=workers[best.key.prefill].worker, decode=workers[best.key.decode].worker)


def choose_prefill(snapshot: Snapshot) -> Placement:
    """The least loaded prefill worker, for one token without a handoff. Raises Unavailable without any."""
    best = min(_present(snapshot, Role.PREFILL), key=lambda state: (_work(state), -state.load.blocks.free))
    return Placement(prefill=best.worker, decode=None)


def nearest(verdicts: list[Verdict]) -> Verdict:
    """The verdict with the fewest differences that refuse; `verdicts` is not empty."""
    return min(verdicts, key=lambda v: sum(d.action is DifferenceAction.REJECT for d in v.differences))


def _present(snapshot: Snapshot, role: Role) -> list[WorkerState]:
    states = snapshot.of_role(role)
    if not states:
        raise Unavailable(
            f"no {role.value} worker takes requests now; start one, or wait until one has registered"
        )
    return states


def _no_pair(pairs: list[PairState]) -> Exception:
    pending = [pair for pair in pairs if pair.verdict is None]
    if pending:
        troubles = sorted(
            {
                f"{pair.key.prefill.worker} with {pair.key.decode.worker}: {_trouble(pair)}"
                for pair in pending
                if pair.trouble
            }
        )
        why = "; ".join(troubles) or "pairing is under way"
        return Unavailable(f"no pair of workers is ready: {why}")
    refused = [pair.verdict for pair in pairs if pair.verdict is not None and not pair.usable()]
    if not refused:
        return Unavailable("no other pair of workers is ready")
    verdict = nearest(refused)
    fields = ", ".join(sorted({d.field for d in verdict.differences if d.action is DifferenceAction.REJECT}))
    return NoCompatiblePair(
        f"no prefill worker and decode worker can share a cache: they differ in {fields}", verdict=verdict
    )


def _trouble(pair: PairState) -> str:
    return f"{pair.trouble}" if pair.quarantine_end_s is None else f"in quarantine: {pair.trouble}"


def _cost(pair: PairState, prefill: WorkerState, decode: WorkerState) -> tuple[int, int, int]:
    assert pair.verdict is not None
    return (
        _PREFERENCE[pair.verdict.word],
        _work(prefill) + _work(decode),
        -decode.load.blocks.free,
    )


def _work(state: WorkerState) -> int:
    """Requests that it holds: what it last said, or what was assigned since, whichever is more."""
    return max(state.assigned, state.load.running_requests + state.load.waiting_requests)
