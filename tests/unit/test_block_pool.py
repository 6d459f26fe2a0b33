"""Blocks have one holder each and come back once."""

from __future__ import annotations

import threading

import pytest

from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockCounts


def test_allocation_is_all_or_none() -> None:
    pool = BlockPool(4)
    pool.allocate(3, "sequence")
    with pytest.raises(Exhausted, match="1 of 4 are free") as refusal:
        pool.allocate(2, "reservation")
    assert refusal.value.retry_after_s > 0
    assert pool.counts() == BlockCounts(free=1, total=4)


def test_a_block_freed_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, "sequence")
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_free_block_can_not_move() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, "sequence")
    pool.free(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.move(blocks, "reservation")


def test_held_blocks_are_counted_by_their_holder() -> None:
    pool = BlockPool(8)
    reserved = pool.allocate(3, "reservation")
    pool.allocate(2, "sequence")
    assert pool.held() == {"reservation": 3, "sequence": 2}
    pool.move(reserved[:2], "sequence")
    assert pool.held() == {"reservation": 1, "sequence": 4}


def test_listeners_hear_of_freed_blocks_and_may_allocate_at_once() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2, "sequence")
    taken: list[int] = []
    stop = pool.on_free(lambda: taken.extend(pool.allocate(1, "reservation")))
    pool.free(blocks)
    assert len(taken) == 1
    stop()
    pool.free(tuple(pool.allocate(1, "sequence")))
    assert len(taken) == 1


def test_threads_never_get_the_same_block() -> None:
    pool = BlockPool(64)
    seen: list[int] = []

    def take() -> None:
        for _ in range(16):
            seen.extend(pool.allocate(1, "sequence"))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(64))
