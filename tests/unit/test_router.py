"""Which workers a request goes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, Registry, Snapshot
from coordinator.router import OnPrefill, choose_decode, choose_pair, choose_prefill, served_context
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


def test_one_token_goes_to_the_least_loaded_prefill_worker_and_to_no_decode_worker() -> None:
    state = snapshot(
        {"busy": make_load(running=1), "idle": make_load()},
        {"d": make_load()},
        {("busy", "d"): ACCEPT, ("idle", "d"): ACCEPT},
    )
    placement = choose_prefill(state)
    assert placement == OnPrefill(prefill=_worker("idle", Role.PREFILL))
    assert placement.key() is None


def test_one_token_needs_a_prefill_worker_that_some_decode_worker_agrees_with() -> None:
    loads = {"refused": make_load(), "busy": make_load(running=5)}
    verdicts = {("refused", "d"): REJECT, ("busy", "d"): CONVERT}
    assert choose_prefill(snapshot(loads, {"d": make_load()}, verdicts)).prefill.life.worker == "busy"


def test_one_token_is_refused_as_longer_requests_are() -> None:
    with pytest.raises(NoCompatiblePair, match="inv_freq"):
        choose_prefill(snapshot({"p": make_load()}, {"d": make_load()}, {("p", "d"): REJECT}))
    with pytest.raises(Unavailable, match="no decode worker"):
        choose_prefill(snapshot({"p": make_load()}, {}, {}))
    with pytest.raises(Unavailable, match="pairing is under way"):
        choose_prefill(snapshot({"p": make_load()}, {"d": make_load()}, {}))


def test_a_last_token_goes_to_the_contract_that_began_the_text() -> None:
    registry = Registry()
    other = make_contract(kv_heads=8)
    registry.register(_worker("d", Role.DECODE), make_load(), 0.0)
    registry.register(_worker("same", Role.PREFILL), make_load(running=5), 0.0)
    registry.register(replace(_worker("other", Role.PREFILL), contract=other), make_load(), 0.0)
    for name in ("same", "other"):
        registry.record_verdict(PairKey(make_life(name), make_life("d")), ACCEPT)
    state = registry.snapshot()
    assert choose_prefill(state).prefill.life.worker == "other"
    gone = _worker("gone", Role.PREFILL)
    assert choose_prefill(state, began=gone).prefill.life.worker == "same"
    with pytest.raises(Unavailable, match="contract that began"):
        choose_prefill(state, began=replace(gone, contract=make_contract(kv_heads=1)))


def test_a_last_token_of_a_text_that_a_decode_worker_began_goes_to_a_partner_of_that_contract() -> None:
    registry = Registry()
    for name, contract in (("same", make_contract()), ("other", make_contract(kv_heads=8))):
        registry.register(replace(_worker(name, Role.DECODE), contract=contract), make_load(), 0.0)
    registry.register(_worker("busy", Role.PREFILL), make_load(running=5), 0.0)
    registry.register(_worker("idle", Role.PREFILL), make_load(), 0.0)
    for pair in (("busy", "same"), ("idle", "other")):
        registry.record_verdict(PairKey(*map(make_life, pair)), CONVERT)
    state = registry.snapshot()
    began = _worker("gone", Role.DECODE)
    assert choose_prefill(state).prefill.life.worker == "idle"
    assert choose_prefill(state, began=began).prefill.life.worker == "busy"
    with pytest.raises(Unavailable, match="contract that began"):
        choose_prefill(state, began=replace(began, contract=make_contract(kv_heads=1)))


def test_a_short_prompt_goes_to_the_least_loaded_decode_worker_of_a_usable_pair() -> None:
    verdicts = {("p", "idle"): REJECT, ("p", "light"): CONVERT, ("p", "busy"): ACCEPT}
    decode = {"busy": make_load(running=2), "light": make_load(running=1), "idle": make_load()}
    state = snapshot({"p": make_load(running=50)}, decode, verdicts)
    placement = choose_decode(state)
    assert [worker.life.worker for worker in placement.workers()] == ["light"]
    assert placement.key() is None


def test_a_short_prompt_prefers_a_decode_worker_with_room_for_it() -> None:
    size = make_contract().layout.block_size
    decode = {"full": make_load(free=1), "busy": make_load(running=3, free=2)}
    state = snapshot({"p": make_load()}, decode, {("p", "full"): ACCEPT, ("p", "busy"): ACCEPT})
    assert choose_decode(state, prompt_tokens=size).decode.life.worker == "full"
    assert choose_decode(state, prompt_tokens=size + 1).decode.life.worker == "busy"
    assert choose_decode(state, prompt_tokens=2 * size + 1).decode.life.worker == "full"


def test_a_short_prompt_keeps_away_from_barred_pairs() -> None:
    state = snapshot(
        {"p": make_load()},
        {"a": make_load(), "b": make_load(running=5)},
        {("p", "a"): ACCEPT, ("p", "b"): ACCEPT},
    )
    barred = {PairKey(make_life("p"), make_life("a"))}
    assert choose_decode(state, barred).decode.life.worker == "b"
    with pytest.raises(Unavailable, match="no other pair"):
        choose_decode(state, barred | {PairKey(make_life("p"), make_life("b"))})


def test_a_short_prompt_is_refused_as_longer_ones_are() -> None:
    with pytest.raises(NoCompatiblePair, match="inv_freq"):
        choose_decode(snapshot({"p": make_load()}, {"d": make_load()}, {("p", "d"): REJECT}))
    with pytest.raises(Unavailable, match="no prefill worker"):
        choose_decode(snapshot({}, {"d": make_load()}, {}))
    with pytest.raises(Unavailable, match="pairing is under way"):
        choose_decode(snapshot({"p": make_load()}, {"d": make_load()}, {}))


def mixed_contexts(verdict: Verdict | None) -> Snapshot:
    """A pair that serves 64 tokens and agrees, and one with 32 of which `verdict` is told."""
    registry = Registry()
    registry.register(_worker("p", Role.PREFILL), make_load(), 0.0)
    for name, tokens in (("long", 64), ("short", 32)):
        contract = make_contract(context_tokens=tokens)
        registry.register(replace(_worker(name, Role.DECODE), contract=contract), make_load(), 0.0)
    registry.record_verdict(PairKey(make_life("p"), make_life("long")), ACCEPT)
    if verdict is not None:
        registry.record_verdict(PairKey(make_life("p"), make_life("short")), verdict)
    return registry.snapshot()


@pytest.mark.parametrize(("verdict", "served"), [(ACCEPT, 32), (None, 32), (REJECT, 64)])
def test_the_served_context_is_the_smallest_of_pairs_that_are_not_refused(
    verdict: Verdict | None, served: int
) -> None:
    assert served_context(mixed_contexts(verdict), 4096) == served
    assert served_context(mixed_contexts(verdict), 16) == 16
    assert served_context(Registry().snapshot(), 4096) == 4096


def test_a_request_goes_to_no_pair_with_a_shorter_context() -> None:
    state = mixed_contexts(ACCEPT)
    placement = choose_pair(state, {PairKey(make_life("p"), make_life("long"))})
    assert placement.decode.life.worker == "short"
    placement = choose_pair(state, table_length=33)
    assert placement.decode.life.worker == "long"
    for choose in (choose_pair, choose_prefill, choose_decode):
        with pytest.raises(Unavailable, match="serves 65 tokens"):
            choose(state, table_length=65)
