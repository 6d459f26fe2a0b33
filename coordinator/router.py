"""Which workers a request goes to. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, PairState, Snapshot, WorkerState
from kvpact.contract.identity import contract_digest
from kvpact.errors import NoCompatiblePair, Unavailable
from kvpact.types import DifferenceAction, Role, Verdict, VerdictWord, WorkerLife

_PREFERENCE = {VerdictWord.ACCEPT: 0, VerdictWord.CONVERT: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPair:
    """A prefill worker computes the prompt and hands it over to a decode worker."""

    prefill: RegisteredWorker
    decode: RegisteredWorker

    def workers(self) -> tuple[RegisteredWorker, ...]:
        """Who takes part, whoever computes the prompt first."""
        return self.prefill, self.decode

    def key(self) -> PairKey | None:
        """The pair."""
        return PairKey(self.prefill.life, self.decode.life)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPrefill:
    """A prefill worker alone gives the one token that is asked."""

    prefill: RegisteredWorker

    def workers(self) -> tuple[RegisteredWorker, ...]:
        """It alone."""
        return (self.prefill,)

    def key(self) -> PairKey | None:
        """None: there is no pair."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDecode:
    """A decode worker alone computes the prompt and decodes it."""

    decode: RegisteredWorker

    def workers(self) -> tuple[RegisteredWorker, ...]:
        """It alone."""
        return (self.decode,)

    def key(self) -> PairKey | None:
        """None: there is no pair."""
        return None


Placement = OnPair | OnPrefill | OnDecode
"""Workers of one attempt."""


def choose_pair(snapshot: Snapshot, barred: Set[PairKey] = frozenset(), *, table_length: int = 0) -> OnPair:
    """The best usable pair: accept before convert, then least work, then most free blocks on the decode side.

    `table_length`: positions that both must serve.

    Raises:
        NoCompatiblePair: every pair was refused; carries the verdict nearest to working.
        Unavailable: a role has no worker, pairs are not settled yet, or none serves so many positions.
    """
    workers = _workers(snapshot)
    usable = _usable(snapshot, workers, barred, table_length)
    best = min(usable, key=lambda pair: _cost(pair, workers[pair.key.prefill], workers[pair.key.decode]))
    return OnPair(prefill=workers[best.key.prefill].worker, decode=workers[best.key.decode].worker)


def choose_prefill(
    snapshot: Snapshot, *, table_length: int = 0, began: RegisteredWorker | None = None
) -> OnPrefill:
    """The least loaded prefill worker of a usable pair, for one token without a handoff.

    `began`: the worker that computed the prompt, where this is the text's last token: of the pair, the one in
    its role must have its contract.

    Raises:
        NoCompatiblePair, Unavailable: as choose_pair; Unavailable too where none has this contract.
    """
    workers = _workers(snapshot)
    pairs = _usable(snapshot, workers, frozenset(), table_length)
    lives = dict.fromkeys(pair.key.prefill for pair in pairs if _goes_on(pair, workers, began))
    if not lives:
        raise Unavailable("no pair of workers with the contract that began this text takes requests now")
    best = min((workers[life] for life in lives), key=lambda state: (_work(state), -state.load.blocks.free))
    return OnPrefill(prefill=best.worker)


def choose_decode(
    snapshot: Snapshot,
    barred: Set[PairKey] = frozenset(),
    *,
    table_length: int = 0,
    prompt_tokens: int = 1,
) -> OnDecode:
    """The decode worker of a usable pair that computes a prompt itself: with room for it, then least work.

    Without a usable pair it is refused as longer prompts are, so that an answer doesn't depend on length.

    Raises:
        NoCompatiblePair, Unavailable: as choose_pair.
    """
    workers = _workers(snapshot)
    lives = dict.fromkeys(pair.key.decode for pair in _usable(snapshot, workers, barred, table_length))
    best = min((workers[life] for life in lives), key=lambda state: _cost_alone(state, prompt_tokens))
    return OnDecode(decode=best.worker)


def served_context(snapshot: Snapshot, own: int) -> int:
    """Positions that every pair serves which isn't refused; at most `own`."""
    workers = {state.worker.life: state for role in Role for state in snapshot.of_role(role)}
    pairs = [pair for pair in _pairs_of(snapshot, workers) if pair.verdict is None or pair.usable()]
    return min([own, *(_context(pair, workers) for pair in pairs)])


def obstacle_of(snapshot: Snapshot, life: WorkerLife) -> str:
    """Why a known worker gets no request that needs a handoff; empty where it can."""
    workers = {state.worker.life: state for role in Role for state in snapshot.of_role(role)}
    if life not in workers:
        return f"{life.worker} takes no new work"
    pairs = [pair for pair in _pairs_of(snapshot, workers) if life in (pair.key.prefill, pair.key.decode)]
    if any(pair.usable() for pair in pairs):
        return ""
    other = Role.DECODE if workers[life].worker.role is Role.PREFILL else Role.PREFILL
    if not pairs:
        return f"no {other.value} worker takes requests now{draining_of(snapshot, other)}"
    error = _no_pair(pairs)
    if isinstance(error, NoCompatiblePair) and error.verdict is not None:
        return f"no {other.value} worker can share a cache with it: they differ in " + refusing_fields(
            error.verdict
        )
    return str(error)


def refusing_fields(verdict: Verdict) -> str:
    """Names of the fields that refuse, for people."""
    return ", ".join(sorted({d.field for d in verdict.differences if d.action is DifferenceAction.REJECT}))


def nearest(verdicts: list[Verdict]) -> Verdict:
    """The verdict with the fewest differences that refuse; `verdicts` is not empty."""
    return min(verdicts, key=lambda v: sum(d.action is DifferenceAction.REJECT for d in v.differences))


def _workers(snapshot: Snapshot) -> Mapping[WorkerLife, WorkerState]:
    """Workers that take new work. Raises Unavailable where a role has none."""
    return {state.worker.life: state for role in Role for state in _present(snapshot, role)}


def _present(snapshot: Snapshot, role: Role) -> list[WorkerState]:
    states = snapshot.of_role(role)
    if not states:
        draining = draining_of(snapshot, role)
        remedy = f"start another (kvpact scale --{role.value} N, where `kvpact up` started it)"
        if not draining:
            remedy = "start one, or wait until one has registered"
        raise Unavailable(f"no {role.value} worker takes requests now{draining}; {remedy}")
    return states


def draining_of(snapshot: Snapshot, role: Role) -> str:
    """Which workers of a role finish what they have, as a part of a sentence; empty where none does."""
    names = sorted(state.worker.life.worker for state in snapshot.workers if _drains(state, role))
    verb = "is" if len(names) == 1 else "are"
    return f": {', '.join(names)} {verb} draining" if names else ""


def _drains(state: WorkerState, role: Role) -> bool:
    return state.worker.role is role and state.load.draining


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
    return NoCompatiblePair(
        f"no prefill worker and decode worker can share a cache: they differ in {refusing_fields(verdict)}",
        verdict=verdict,
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


def _cost_alone(decode: WorkerState, prompt_tokens: int) -> tuple[bool, int, int]:
    free = decode.load.blocks.free
    lacks_room = free * decode.worker.contract.layout.block_size < prompt_tokens
    return lacks_room, _work(decode), -free


def _goes_on(
    pair: PairState, workers: Mapping[WorkerLife, WorkerState], began: RegisteredWorker | None
) -> bool:
    """Whether a text that `began` computed may end on this pair; None: it begins here."""
    if began is None:
        return True
    life = pair.key.prefill if began.role is Role.PREFILL else pair.key.decode
    return contract_digest(workers[life].worker.contract) == contract_digest(began.contract)


def _work(state: WorkerState) -> int:
    """Requests that it holds: what it last said, or what was assigned since, whichever is more."""
    return max(state.assigned, state.load.running_requests + state.load.waiting_requests)
