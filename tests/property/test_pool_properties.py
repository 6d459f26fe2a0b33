"""Whatever the order of calls, a pool conserves its blocks and gives each to those who may have it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpact.contract.content_identity import ContentId
from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock, Reuse
from kvpact.types import BlockId

TOTAL = 12
HOLDERS = ("sequence", "handoff", "canary")
NAMES = [ContentId(bytes([number]) * 32) for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a list of grants and with what was written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.grants: list[tuple[str, tuple[BlockId, ...]]] = []
        self.content: dict[BlockId, ContentId] = {}
        """What whoever had a block alone wrote into it last."""
        self.frees_heard = 0
        self.pool.on_free(self.hear)

    def hear(self) -> None:
        self.frees_heard += 1

    def granted(self) -> list[BlockId]:
        return [block for _, blocks in self.grants for block in blocks]

    @rule(count=st.integers(0, TOTAL + 2), holder=st.sampled_from(HOLDERS))
    def allocate(self, count: int, holder: str) -> None:
        fits = count <= TOTAL - len(set(self.granted()))
        try:
            blocks = self.pool.allocate(count, holder)
        except Exhausted:
            assert not fits
            return
        assert fits
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.granted())
        for block in blocks:
            self.content.pop(block, None)
        self.grants.append((holder, blocks))

    @rule(
        names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4),
        more=st.integers(0, 3),
        leave_free=st.integers(0, 3),
        holder=st.sampled_from(HOLDERS),
    )
    def reuse(self, names: list[ContentId], more: int, leave_free: int, holder: str) -> None:
        before = self.pool.counts()
        held = set(self.granted())
        try:
            reuse = Reuse(names=names, choose=len)
            granted = self.pool.grant(len(names) + more, holder, reuse=reuse, leave_free=leave_free)
        except Exhausted:
            assert self.pool.counts() == before
            return
        shared = [entry.block for entry in granted.reused]
        assert granted.blocks[: len(shared)] == tuple(shared)
        assert len(set(granted.blocks)) == len(names) + more
        assert [self.content[block] for block in shared] == names[: len(shared)]
        anew = set(granted.blocks[len(shared) :])
        assert not anew & held
        assert self.pool.counts().free >= leave_free or not anew
        for block in anew:
            self.content.pop(block, None)
        self.grants.append((holder, granted.blocks))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def keep(self, data: st.DataObject, name: ContentId) -> None:
        """Only whoever has a block alone, and didn't name it before, writes and names it."""
        granted = self.granted()
        alone = [block for block in granted if granted.count(block) == 1 and block not in self.content]
        if not alone:
            return
        block = data.draw(st.sampled_from(alone))
        self.content[block] = name
        self.pool.keep(CachedBlock(name=name, block=block, whole_groups=frozenset({0})))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: ContentId) -> None:
        self.pool.forget(lambda entry: entry.name == name)
        assert self.pool.forget(lambda entry: entry.name == name) == 0

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder, blocks = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        heard = self.frees_heard
        self.pool.free(blocks, holder)
        assert self.frees_heard == heard + bool(blocks)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def move(self, data: st.DataObject, holder: str) -> None:
        index = data.draw(st.integers(0, len(self.grants) - 1))
        source, blocks = self.grants[index]
        self.pool.move(blocks, source, holder)
        self.grants[index] = (holder, blocks)

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = set(self.granted())
        assert held <= set(range(TOTAL))
        counts = self.pool.counts()
        assert counts.free == TOTAL - len(held)
        assert 0 <= counts.cached <= counts.free
        for holder in HOLDERS:
            expected = {block for name, blocks in self.grants if name == holder for block in blocks}
            assert dict(counts.held).get(holder, 0) == len(expected)
        assert self.pool.held() == dict(counts.held)


TestPool = PoolMachine.TestCase
