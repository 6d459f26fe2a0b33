"""Which workers a request goes to. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, PairState, Snapshot, WorkerState
from kvpact.contract.identity import contract_digest
from kvpact.errors import NoCompatiblePair, Unavailable
from kvpact.types import ContractDigest, DifferenceAction, Role, Verdict, VerdictWord, WorkerLife

_PREFERENCE = {VerdictWord.ACCEPT: 0, VerdictWord.CONVERT: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Workers of one attempt. `decode` None: nothing is handed over."""

    prefill: RegisteredWorker
    decode: RegisteredWorker | None

    def key(self) -> PairKey | None:
        """The pair, where there is one."""
        return PairKey(self.prefill.life, self.decode.life) if self.decode else None


def choose_pair(
    snapshot: Snapshot, barred: Set[PairKey] = frozenset(), *, table_length: int = 0
) -> Placement:
    """The best usable pair: accept before convert, then least work, then most free blocks on the decode side.

    `table_length`: positions that both must serve.

    Raises:
        NoCompatiblePair: every pair was refused; carries the verdict nearest to working.
        Unavailable: a role has no worker, pairs are not settled yet, or none serves so many positions.
    """
    workers = {state.worker.life: state for role in Role for state in _present(snapshot, role)}
    usable = _usable(snapshot, workers, barred, table_length)
    best = min(usable, key=lambda pair: _cost(pair, workers[pair.key.prefill], workers[pair.key.decode]))
    return Placement(prefill=workers[best.key.prefill].worker, decode=workers[best.key.decode].worker)


def choose_prefill(
    snapshot: Snapshot, *, table_length: int = 0, contract: ContractDigest | None = None
) -> Placement:
    """The least loaded prefill worker of a usable pair, for one token without a handoff.

    `contract`: of the worker that began the text, where this is its last token.

    Raises:
        NoCompatiblePair, Unavailable: as choose_pair; Unavailable too where none has this contract.
    """
    workers = {state.worker.life: state for role in Role for state in _present(snapshot, role)}
    lives = {pair.key.prefill for pair in _usable(snapshot, workers, frozenset(), table_length)}
    states = [
        workers[life]
        for life in lives
        if contract is None or contract_digest(workers[life].worker.contract) == contract
    ]
    if not states:
        raise Unavailable("no prefill worker with the contract that began this text takes requests now")
    best = min(states, key=lambda state: (_work(state), -state.load.blocks.free))
    return Placement(prefill=best.worker, decode=None)


def served_context(snapshot: Snapshot, own: int) -> int:
    """Positions that every pair serves which isn't refused; at most `own`."""
    workers = {state.worker.life: state for role in Role for state in snapshot.of_role(role)}
    pairs = [pair for pair in _pairs_of(snapshot, workers) if pair.verdict is None or pair.usable()]
    return min([own, *(_context(pair, workers) for pair in pairs)])


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


def _pairs_of(snapshot: Snapshot, workers: Mapping[WorkerLife, WorkerState]) -> list[PairState]:
    return [pair for pair in snapshot.pairs if pair.key.prefill in workers and pair.key.decode in workers]


def _usable(
    snapshot: Snapshot, workers: Mapping[WorkerLife, WorkerState], barred: Set[PairKey], table_length: int
) -> list[PairState]:
    """One usable pair at least. Raises what choose_pair raises."""
    pairs = _pairs_of(snapshot, workers)
    usable = [pair for pair in pairs if pair.usable() and pair.key not in barred]
    if not usable:
        raise _no_pair(pairs)
    fitting = [pair for pair in usable if table_length <= _context(pair, workers)]
    if not fitting:
        raise Unavailable(f"no pair of workers that serves {table_length} tokens is ready")
    return fitting


def _context(pair: PairState, workers: Mapping[WorkerLife, WorkerState]) -> int:
    """Positions that both serve."""
    return min(
        workers[life].worker.contract.model.context_tokens for life in (pair.key.prefill, pair.key.decode)
    )


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
