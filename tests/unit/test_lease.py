"""Leases end when their time is over and not before; tombstones are kept for a while and not for ever."""

from __future__ import annotations

from kvpact.clock import ManualClock
from kvpact.handoff.lease import Graveyard, LeaseTable, Tombstone
from kvpact.handoff.lease_timer import LeaseTimer
from kvpact.handoff.messages import HandoffState
from tests.handoff_fakes import FakeAlarms, make_handoff_id

FIRST, SECOND, THIRD = (make_handoff_id(number) for number in (1, 2, 3))
STONE = Tombstone(state=HandoffState.RELEASED, reason="released")


def test_leases_end_in_the_order_of_their_renewals() -> None:
    leases = LeaseTable(10.0)
    leases.renew(FIRST, now=0.0)
    leases.renew(SECOND, now=1.0)
    leases.renew(FIRST, now=2.0)
    assert leases.next_expiry() == 11.0
    assert leases.expired(now=10.9) == ()
    assert leases.expired(now=11.0) == (SECOND,)
    assert leases.expired(now=12.0) == (SECOND, FIRST)


def test_a_dropped_lease_is_forgotten() -> None:
    leases = LeaseTable(10.0)
    leases.renew(FIRST, now=0.0)
    leases.drop(FIRST)
    leases.drop(FIRST)
    assert leases.expired(now=99.0) == ()
    assert leases.next_expiry() is None


def test_a_tombstone_is_found_for_its_time_only() -> None:
    graveyard = Graveyard(keep_s=10.0, most=8)
    graveyard.bury(FIRST, STONE, now=0.0)
    assert graveyard.find(FIRST, now=9.9) == STONE
    assert graveyard.find(FIRST, now=10.0) is None
    assert graveyard.find(SECOND, now=0.0) is None


def test_old_tombstones_make_room_for_new_ones() -> None:
    graveyard = Graveyard(keep_s=10.0, most=2)
    for handoff_id in (FIRST, SECOND, THIRD):
        graveyard.bury(handoff_id, STONE, now=0.0)
    assert graveyard.find(FIRST, now=1.0) is None
    assert graveyard.find(THIRD, now=1.0) == STONE
    graveyard.bury(FIRST, STONE, now=20.0)
    assert len(graveyard) == 1


def test_a_timer_sets_one_alarm_at_a_time_and_rings_once() -> None:
    clock, rung = ManualClock(), []
    alarms = FakeAlarms(clock)
    timer = LeaseTimer(clock=clock, on_due=lambda: rung.append(clock.now()), call_later=alarms.call_later)
    timer.arm(None)
    timer.arm(5.0)
    timer.arm(7.0)
    assert alarms.set_count == 1
    alarms.advance(5.0)
    alarms.advance(5.0)
    assert rung == [5.0]
    timer.arm(11.0)
    timer.close()
    timer.close()
    alarms.advance(5.0)
    assert rung == [5.0]
