"""What a request may still try after failures of its workers."""

from __future__ import annotations

import pytest

from coordinator.ports import RegisteredWorker
from coordinator.registry import PairKey, Registry, Snapshot
from coordinator.retries import Retries
from coordinator.router import OnDecode, OnPair, OnPrefill, Placement
from kvpact.errors import DataLoss, Exhausted, KvpactError, Unavailable
from kvpact.types import Role
from tests.coordinator_fakes import make_life, make_load
from tests.factories import make_contract

LOST = Unavailable("reset")
BROKEN = DataLoss("chunk 3", check="checksum")
FULL = Exhausted("full", retry_after_s=1.0)


def worker(name: str) -> RegisteredWorker:
    """p... is a prefill worker, d... a decode worker."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return RegisteredWorker(
        life=make_life(name), role=role, endpoint=f"{name}:1", contract=make_contract(), pid=1
    )


def placed(prefill: str, decode: str | None) -> Placement:
    """A placement by names."""
    if decode is None:
        return OnPrefill(prefill=worker(prefill))
    return OnPair(prefill=worker(prefill), decode=worker(decode))


def key(prefill: str, decode: str) -> PairKey:
    """A pair by names."""
    return PairKey(make_life(prefill), make_life(decode))


def everyone() -> Snapshot:
    """Two workers of each role."""
    registry = Registry()
    for name in ("p1", "p2", "d1", "d2"):
        registry.register(worker(name), make_load(), 0.0)
    return registry.snapshot()


@pytest.mark.parametrize("error", [LOST, BROKEN, FULL])
def test_one_more_try_without_a_token_in_between(error: KvpactError) -> None:
    retries = Retries()
    assert retries.failed(placed("p1", "d1"), error)
    assert not retries.failed(placed("p1", "d2"), LOST)
    assert retries.failure is LOST


def test_a_token_earns_another_try() -> None:
    retries = Retries()
    assert retries.failed(placed("p1", "d1"), LOST)
    retries.progressed()
    assert retries.failed(placed("p1", "d1"), LOST)


def test_broken_data_are_tried_once_more_in_all_whatever_came_in_between() -> None:
    retries = Retries()
    assert retries.failed(placed("p1", "d1"), BROKEN)
    retries.progressed()
    assert not retries.failed(placed("p1", "d2"), BROKEN)


def test_a_pair_with_broken_data_is_kept_away_from_for_good() -> None:
    retries = Retries()
    retries.failed(placed("p1", "d1"), BROKEN)
    retries.progressed()
    assert retries.barred(everyone()) == {key("p1", "d1")}


def test_a_full_decode_worker_is_avoided_with_every_prefill_worker_until_a_token_comes() -> None:
    retries = Retries()
    retries.failed(placed("p1", "d1"), FULL)
    assert retries.barred(everyone()) == {key("p1", "d1"), key("p2", "d1")}
    retries.progressed()
    assert retries.barred(everyone()) == set()


def test_a_full_prefill_worker_alone_is_not_asked_again() -> None:
    assert not Retries().failed(placed("p1", None), FULL)


def test_a_decode_worker_that_is_too_full_to_compute_a_prompt_itself_is_avoided() -> None:
    retries = Retries()
    assert retries.failed(OnDecode(decode=worker("d1")), FULL)
    assert retries.barred(everyone()) == {key("p1", "d1"), key("p2", "d1")}
    assert not retries.failed(OnDecode(decode=worker("d2")), FULL)


@pytest.mark.parametrize("error", [LOST, BROKEN])
def test_a_failure_without_a_handoff_bars_no_pair(error: KvpactError) -> None:
    retries = Retries()
    assert retries.failed(OnDecode(decode=worker("d1")), error)
    assert retries.barred(everyone()) == set()


@pytest.mark.parametrize(("error", "helps"), [(LOST, True), (BROKEN, False), (FULL, False)])
def test_waiting_mends_only_what_comes_back(error: KvpactError, helps: bool) -> None:
    retries = Retries()
    assert retries.may_wait()
    retries.failed(placed("p1", "d1"), error)
    assert retries.may_wait() is helps
