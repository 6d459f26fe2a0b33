"""Which workers a request goes to."""

from __future__ import annotations

import pytest

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, Registry, Snapshot
from coordinator.router import choose_pair, choose_prefill
from kvpact.errors import NoCompatiblePair, Unavailable
from kvpact.types import Role, Verdict, VerdictWord, WorkerLoad
from tests.coordinator_fakes import make_life, make_load, make_verdict
from tests.factories import make_contract

ACCEPT, CONVERT = make_verdict(VerdictWord.ACCEPT), make_verdict(VerdictWord.CONVERT, fields=["axis_order"])
REJECT = make_verdict(VerdictWord.REJECT, fields=["inv_freq", "kv_heads"])


def snapshot(
    prefill: dict[str, WorkerLoad], decode: dict[str, WorkerLoad], verdicts: dict[tuple[str, str], Verdict]
) -> Snapshot:
    """Workers by name with their load, and what some pairs agreed on."""
    registry = Registry()
    for role, loads in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for name, load in loads.items():
            registry.register(_worker(name, role), load, 0.0)
    for (writer, reader), verdict in verdicts.items():
        registry.record_verdict(PairKey(make_life(writer), make_life(reader)), verdict)
    return registry.snapshot()


def _worker(name: str, role: Role) -> RegisteredWorker:
    return RegisteredWorker(
        life=make_life(name), role=role, endpoint=f"127.0.0.1:{len(name)}", contract=make_contract(), pid=1
    )


def chosen(of: Snapshot, barred: set[PairKey] | None = None) -> tuple[str, str]:
    """Names of the pair that is picked."""
    placement = choose_pair(of, barred or set())
    assert placement.decode is not None
    return placement.prefill.life.worker, placement.decode.life.worker


def test_a_pair_that_accepts_goes_before_one_that_converts_even_under_load() -> None:
    state = snapshot(
        {"p": make_load()},
        {"idle": make_load(), "busy": make_load(running=9)},
        {("p", "idle"): CONVERT, ("p", "busy"): ACCEPT},
    )
    assert chosen(state) == ("p", "busy")


def test_the_pair_with_less_work_is_picked_then_the_one_with_more_free_blocks() -> None:
    verdicts = {("p", "a"): ACCEPT, ("p", "b"): ACCEPT, ("p", "c"): ACCEPT}
    decode = {"a": make_load(running=2), "b": make_load(waiting=1, free=3), "c": make_load(running=1, free=9)}
    assert chosen(snapshot({"p": make_load()}, decode, verdicts)) == ("p", "c")


def test_a_draining_worker_gets_nothing() -> None:
    verdicts = {("p", "a"): ACCEPT, ("p", "b"): ACCEPT}
    decode = {"a": make_load(draining=True), "b": make_load(running=5)}
    assert chosen(snapshot({"p": make_load()}, decode, verdicts)) == ("p", "b")


def test_a_barred_pair_is_left_out() -> None:
    state = snapshot(
        {"p": make_load()},
        {"a": make_load(), "b": make_load(running=5)},
        {("p", "a"): ACCEPT, ("p", "b"): ACCEPT},
    )
    assert chosen(state, {PairKey(make_life("p"), make_life("a"))}) == ("p", "b")


def test_only_refused_pairs_give_the_verdict_nearest_to_working() -> None:
    near = make_verdict(VerdictWord.REJECT, fields=["inv_freq"])
    state = snapshot(
        {"p": make_load()}, {"a": make_load(), "b": make_load()}, {("p", "a"): REJECT, ("p", "b"): near}
    )
    with pytest.raises(NoCompatiblePair, match="inv_freq") as refusal:
        choose_pair(state)
    assert refusal.value.verdict == near


@pytest.mark.parametrize(("prefill", "decode", "missing"), [(1, 0, "decode"), (0, 1, "prefill")])
def test_a_role_without_a_worker_is_named(prefill: int, decode: int, missing: str) -> None:
    state = snapshot({"p": make_load()} if prefill else {}, {"d": make_load()} if decode else {}, {})
    with pytest.raises(Unavailable, match=f"no {missing} worker"):
        choose_pair(state)


def test_a_pair_without_a_verdict_is_not_used_and_the_trouble_is_told() -> None:
    registry = Registry()
    registry.register(_worker("p", Role.PREFILL), make_load(), 0.0)
    registry.register(_worker("d", Role.DECODE), make_load(), 0.0)
    registry.set_aside(PairKey(make_life("p"), make_life("d")), "can't reach 10.0.0.1:1")
    with pytest.raises(Unavailable, match=r"p with d: can't reach 10\.0\.0\.1:1"):
        choose_pair(registry.snapshot())


def test_a_pair_in_quarantine_is_not_used_and_says_so() -> None:
    registry = Registry()
    registry.register(_worker("p", Role.PREFILL), make_load(), 0.0)
    registry.register(_worker("d", Role.DECODE), make_load(), 0.0)
    registry.record_verdict(PairKey(make_life("p"), make_life("d")), ACCEPT)
    registry.quarantine(PairKey(make_life("p"), make_life("d")), "chunk 3 is broken", end_s=30.0)
    with pytest.raises(Unavailable, match="p with d: in quarantine: chunk 3 is broken"):
        choose_pair(registry.snapshot())


def test_one_token_needs_the_least_loaded_prefill_worker_and_no_decode_worker() -> None:
    placement = choose_prefill(snapshot({"busy": make_load(running=1), "idle": make_load()}, {}, {}))
    assert (placement.prefill.life.worker, placement.decode, placement.key()) == ("idle", None, None)
