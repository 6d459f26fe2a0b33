"""Which workers live, and which pairs are known."""

from __future__ import annotations

from dataclasses import replace

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, Registry
from kvpact.types import Role
from tests.coordinator_fakes import make_life, make_load, make_verdict
from tests.factories import make_contract

PREFILL, DECODE = make_life("p"), make_life("d")


def worker(role: Role, life: int = 1, endpoint: str = "127.0.0.1:1") -> RegisteredWorker:
    """The prefill worker p or the decode worker d."""
    return RegisteredWorker(
        life=make_life(role.value[0], life), role=role, endpoint=endpoint, contract=make_contract(), pid=1
    )


def pair_of_workers() -> Registry:
    """One worker of each role, paired."""
    registry = Registry()
    registry.register(worker(Role.PREFILL), make_load(), 0.0)
    registry.register(worker(Role.DECODE), make_load(), 0.0)
    registry.record_verdict(PairKey(PREFILL, DECODE), make_verdict())
    return registry


def test_every_prefill_worker_is_paired_with_every_decode_worker() -> None:
    registry = pair_of_workers()
    other = RegisteredWorker(
        life=make_life("d2"), role=Role.DECODE, endpoint="127.0.0.1:2", contract=make_contract(), pid=1
    )
    registry.register(other, make_load(), 0.0)
    assert registry.unpaired(0.0) == [PairKey(PREFILL, make_life("d2"))]


def test_a_worker_that_registers_again_as_it_was_keeps_its_pairs_and_its_requests() -> None:
    registry = pair_of_workers()
    registry.assign([DECODE], +1)
    assert registry.register(worker(Role.DECODE), make_load(running=1), 1.0) is None
    assert registry.unpaired(0.0) == []
    state = registry.find(DECODE)
    assert state is not None
    assert (state.assigned, state.load.running_requests, state.last_seen_s) == (1, 1, 1.0)


def test_a_new_life_of_a_name_replaces_the_old_one_and_drops_its_pairs() -> None:
    registry = pair_of_workers()
    replaced = registry.register(worker(Role.DECODE, life=2), make_load(), 1.0)
    assert replaced is not None
    assert replaced.life == DECODE
    assert registry.find(DECODE) is None
    assert registry.unpaired(0.0) == [PairKey(PREFILL, make_life("d", 2))]


def test_the_same_life_at_another_endpoint_is_paired_anew() -> None:
    registry = pair_of_workers()
    assert registry.register(worker(Role.DECODE, endpoint="127.0.0.1:9"), make_load(), 1.0) is not None
    assert registry.unpaired(0.0) == [PairKey(PREFILL, DECODE)]


def test_the_same_life_with_another_contract_is_paired_anew_and_keeps_its_requests() -> None:
    registry = pair_of_workers()
    registry.assign([DECODE], +1)
    known = worker(Role.DECODE)
    other = replace(known, contract=make_contract(block_size=32))
    assert registry.register(other, make_load(), 1.0) == known
    assert registry.unpaired(0.0) == [PairKey(PREFILL, DECODE)]
    state = registry.find(DECODE)
    assert state is not None
    assert (state.worker.contract, state.assigned) == (other.contract, 1)


def test_silent_workers_expire_with_their_pairs() -> None:
    registry = pair_of_workers()
    assert registry.heartbeat(PREFILL, make_load(), 9.0)
    assert [gone.life for gone in registry.expire(5.0)] == [DECODE]
    assert registry.snapshot().pairs == ()
    assert not registry.heartbeat(DECODE, make_load(), 10.0), "it must register again"


def test_a_heartbeat_of_an_older_life_is_not_known() -> None:
    registry = pair_of_workers()
    registry.register(worker(Role.DECODE, life=2), make_load(), 1.0)
    assert not registry.heartbeat(DECODE, make_load(), 2.0)


def test_a_pair_that_was_set_aside_waits_for_a_new_verdict() -> None:
    registry = pair_of_workers()
    key = PairKey(PREFILL, DECODE)
    assert registry.set_aside(key, "checksum")
    assert registry.unpaired(0.0) == [key]
    registry.record_verdict(key, make_verdict())
    assert registry.unpaired(0.0) == []


def test_a_quarantine_holds_until_its_end_whatever_else_fails() -> None:
    registry = pair_of_workers()
    key = PairKey(PREFILL, DECODE)
    assert registry.quarantine(key, "checksum", end_s=30.0)
    assert registry.set_aside(key, "and a reset on top")
    assert registry.unpaired(29.9) == []
    assert registry.unpaired(30.0) == [key]
    [pair] = registry.snapshot().pairs
    assert (pair.word(), pair.usable()) == ("quarantined", False)
    registry.record_verdict(key, make_verdict())
    assert [pair.word() for pair in registry.snapshot().pairs] == ["accept"]


def test_another_life_is_in_no_quarantine() -> None:
    registry = pair_of_workers()
    registry.quarantine(PairKey(PREFILL, DECODE), "checksum", end_s=30.0)
    registry.register(worker(Role.DECODE, life=2), make_load(), 1.0)
    assert registry.unpaired(1.0) == [PairKey(PREFILL, make_life("d", 2))]


def test_a_verdict_for_workers_that_are_gone_changes_nothing() -> None:
    registry = pair_of_workers()
    registry.expire(100.0)
    registry.record_verdict(PairKey(PREFILL, DECODE), make_verdict())
    assert registry.snapshot().pairs == ()
    assert not registry.set_aside(PairKey(PREFILL, DECODE), "late")
    assert not registry.quarantine(PairKey(PREFILL, DECODE), "late", end_s=1.0)
