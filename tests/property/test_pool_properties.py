"""Whatever the order of calls, a pool conserves its blocks and gives each to one holder."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockId

TOTAL = 12
HOLDERS = ("sequence", "reservation", "canary")


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a list of grants."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.grants: list[tuple[str, tuple[BlockId, ...]]] = []
        self.frees_heard = 0
        self.pool.on_free(self.hear)

    def hear(self) -> None:
        self.frees_heard += 1

    def held(self) -> int:
        return sum(len(blocks) for _, blocks in self.grants)

    @rule(count=st.integers(0, TOTAL + 2), holder=st.sampled_from(HOLDERS))
    def allocate(self, count: int, holder: str) -> None:
        fits = count <= TOTAL - self.held()
        try:
            blocks = self.pool.allocate(count, holder)
        except Exhausted:
            assert not fits
            return
        assert fits
        assert len(set(blocks)) == count
        self.grants.append((holder, blocks))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        _, blocks = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        heard = self.frees_heard
        self.pool.free(blocks)
        assert self.frees_heard == heard + bool(blocks)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def move(self, data: st.DataObject, holder: str) -> None:
        index = data.draw(st.integers(0, len(self.grants) - 1))
        _, blocks = self.grants[index]
        self.pool.move(blocks, holder)
        self.grants[index] = (holder, blocks)

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        granted = [block for _, blocks in self.grants for block in blocks]
        assert len(granted) == len(set(granted))
        assert set(granted) <= set(range(TOTAL))
        assert self.pool.counts().free == TOTAL - len(granted)
        for holder in HOLDERS:
            expected = sum(len(blocks) for name, blocks in self.grants if name == holder)
            assert self.pool.held().get(holder, 0) == expected


TestPool = PoolMachine.TestCase
