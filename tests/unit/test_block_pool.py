"""Blocks are free or held, shared ones until their last holder lets go, and cached ones until handed out."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from kvpact.contract.content_identity import ContentId
from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock, Reuse, reach_of_prefix
from kvpact.types import BlockCounts, BlockId

EVERY_GROUP = frozenset({0})


def name(number: int) -> ContentId:
    return ContentId(number.to_bytes(32, "big"))


def entry(number: int, block: BlockId, groups: Iterable[int] = EVERY_GROUP) -> CachedBlock:
    return CachedBlock(name=name(number), block=block, whole_groups=frozenset(groups))


def names_of(*numbers: int) -> Reuse:
    """Takes as many of the named blocks as are known."""
    return Reuse(names=[name(number) for number in numbers], choose=len)


def kept(pool: BlockPool, *numbers: int, holder: str = "sequence") -> tuple[BlockId, ...]:
    """Blocks with content of those names, held."""
    blocks = pool.allocate(len(numbers), holder)
    for number, block in zip(numbers, blocks, strict=True):
        assert pool.keep(entry(number, block))
    return blocks


def test_allocation_is_all_or_none() -> None:
    pool = BlockPool(4)
    pool.allocate(3, "sequence")
    with pytest.raises(Exhausted, match="1 of 4 are free") as refusal:
        pool.allocate(2, "reservation")
    assert refusal.value.retry_after_s > 0
    assert pool.counts() == BlockCounts(free=1, total=4, held=(("sequence", 3),))


def test_a_block_freed_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, "sequence")
    pool.free(blocks, "sequence")
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks, "sequence")


def test_a_free_block_can_not_move() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, "sequence")
    pool.free(blocks, "sequence")
    with pytest.raises(AssertionError, match="is free"):
        pool.move(blocks, "sequence", "reservation")


def test_a_share_that_another_holds_can_neither_be_freed_nor_moved() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, "handoff")
    with pytest.raises(AssertionError, match="sequence holds none"):
        pool.free(blocks, "sequence")
    with pytest.raises(AssertionError, match="sequence holds none"):
        pool.move(blocks, "sequence", "canary")
    assert pool.held() == {"handoff": 1}


def test_held_blocks_are_counted_by_their_holder() -> None:
    pool = BlockPool(8)
    reserved = pool.allocate(3, "reservation")
    pool.allocate(2, "sequence")
    assert pool.held() == {"reservation": 3, "sequence": 2}
    pool.move(reserved[:2], "reservation", "sequence")
    assert pool.held() == {"reservation": 1, "sequence": 4}


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    first = kept(pool, 1, 2)
    granted = pool.grant(3, "handoff", reuse=names_of(1, 2, 3))
    assert granted.blocks[:2] == first
    assert [each.name for each in granted.reused] == [name(1), name(2)]
    assert pool.held() == {"sequence": 2, "handoff": 3}
    pool.free(first, "sequence")
    assert pool.counts().free == 1
    pool.free(granted.blocks, "handoff")
    assert pool.counts() == BlockCounts(free=4, total=4, cached=2)


def test_two_holders_of_one_name_count_a_block_once() -> None:
    pool = BlockPool(4)
    first = kept(pool, 1)
    again = pool.grant(1, "sequence", reuse=names_of(1)).blocks
    assert again == first
    assert pool.held() == {"sequence": 1}
    pool.free(again, "sequence")
    assert pool.held() == {"sequence": 1}


def test_a_cached_block_that_nobody_holds_counts_as_free_and_can_be_shared_again() -> None:
    pool = BlockPool(2)
    blocks = kept(pool, 1)
    pool.free(blocks, "sequence")
    assert pool.counts() == BlockCounts(free=2, total=2, cached=1)
    assert pool.grant(1, "sequence", reuse=names_of(1)).blocks == blocks
    assert pool.counts() == BlockCounts(free=1, total=2, held=(("sequence", 1),))


def test_the_block_let_go_longest_ago_is_handed_out_first_and_uncached_ones_before_it() -> None:
    pool = BlockPool(4)
    old, new = kept(pool, 1), kept(pool, 2)
    pool.free(old, "sequence")
    pool.free(new, "sequence")
    uncached = pool.allocate(2, "sequence")
    assert not set(uncached) & {*old, *new}
    assert pool.allocate(1, "sequence") == old
    assert pool.grant(1, "sequence", reuse=names_of(2)).blocks == new


def test_the_end_of_a_prompt_is_handed_out_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = kept(pool, 1, 2, 3)
    pool.free(blocks, "sequence")
    assert pool.allocate(1, "sequence") == blocks[2:]
    assert [each.block for each in pool.grant(2, "handoff", reuse=names_of(1, 2)).reused] == list(blocks[:2])


def test_blocks_that_are_handed_out_together_ascend_after_any_history() -> None:
    pool = BlockPool(6)
    pool.free(kept(pool, 0, 1, 2, 3), "sequence")
    pool.free(pool.allocate(2, "sequence")[::-1], "sequence")
    assert pool.allocate(6, "sequence") == tuple(range(6))


def test_content_of_a_block_that_is_handed_out_anew_is_forgotten() -> None:
    pool = BlockPool(1)
    pool.free(kept(pool, 1), "sequence")
    pool.free(pool.allocate(1, "sequence"), "sequence")
    assert pool.counts().cached == 0
    assert pool.grant(1, "sequence", reuse=names_of(1)).reused == ()


def test_pinned_cached_blocks_leave_less_room_than_they_seem_to() -> None:
    pool = BlockPool(4)
    pool.free(kept(pool, 1, 2), "sequence")
    assert pool.counts().free == 4
    with pytest.raises(Exhausted, match=r"2 KV blocks wanted for handoff, 2 of 4 are free, 1 stay so"):
        pool.grant(4, "handoff", reuse=names_of(1, 2), leave_free=1)
    assert pool.counts() == BlockCounts(free=4, total=4, cached=2), "a refusal pins nothing"
    assert len(pool.grant(4, "handoff", reuse=names_of(1, 2)).reused) == 2


def test_a_pinned_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    pool.free(kept(pool, 1), "sequence")
    pinned = pool.grant(1, "handoff", reuse=names_of(1)).blocks
    others = pool.allocate(2, "sequence")
    assert not set(pinned) & set(others)
    with pytest.raises(Exhausted):
        pool.allocate(1, "sequence")
    pool.free(others, "sequence")
    assert [each.block for each in pool.grant(1, "sequence", reuse=names_of(1)).reused] == list(pinned)


def test_only_a_block_that_holds_more_takes_a_name_over() -> None:
    pool = BlockPool(4)
    part, whole, again = pool.allocate(3, "sequence")
    assert pool.keep(entry(1, part, groups={0}))
    assert pool.keep(entry(1, whole, groups={0, 1}))
    assert not pool.keep(entry(1, again, groups={0, 1}))
    pool.free((part, whole, again), "sequence")
    assert pool.counts().cached == 1
    assert pool.grant(1, "sequence", reuse=names_of(1)).blocks == (whole,)


def test_doubtful_content_is_forgotten_and_its_holders_keep_their_blocks() -> None:
    pool = BlockPool(3)
    held, let_go = kept(pool, 1), kept(pool, 2)
    pool.free(let_go, "sequence")
    assert pool.forget(lambda each: True) == 2
    assert pool.counts() == BlockCounts(free=2, total=3, held=(("sequence", 1),))
    assert pool.grant(1, "handoff", reuse=names_of(1)).reused == ()
    pool.free(held, "sequence")
    assert pool.counts().cached == 0


def test_a_prefix_reaches_as_far_as_every_layer_group_has_what_is_attended_to() -> None:
    chain = [
        entry(0, BlockId(0), groups={0}),
        entry(1, BlockId(1), groups={0, 1}),
        entry(2, BlockId(2), groups={0, 1}),
    ]

    def window_of(tokens: int, window: int) -> int:
        return max(0, tokens - window)

    def reach(window: int) -> int:
        return reach_of_prefix(
            chain, 16, 2, lambda group, tokens: 0 if group == 0 else window_of(tokens, window)
        )

    assert reach(window=32) == 3
    assert reach(window=16) == 3
    assert reach(window=33) == 0, "one row of block 0 is wanted, which the window's layers lack"


def test_listeners_hear_of_freed_blocks_and_may_allocate_at_once() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2, "sequence")
    taken: list[int] = []
    stop = pool.on_free(lambda: taken.extend(pool.allocate(1, "reservation")))
    pool.free(blocks, "sequence")
    assert len(taken) == 1
    stop()
    pool.free(tuple(pool.allocate(1, "sequence")), "sequence")
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


def test_what_was_computed_from_forgotten_content_isn_t_kept() -> None:
    pool = BlockPool(4)
    pool.free(kept(pool, 1), "sequence")
    granted = pool.grant(3, "sequence", reuse=names_of(1))
    assert pool.keep(entry(2, granted.blocks[1]), behind=granted.reused)
    pool.forget(lambda each: each.name == name(1))
    assert not pool.keep(entry(3, granted.blocks[2]), behind=granted.reused)
    assert pool.grant(1, "handoff", reuse=names_of(3)).reused == ()
