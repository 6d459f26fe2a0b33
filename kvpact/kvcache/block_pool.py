"""Pool of fixed-size KV blocks: who holds a block, and what content free and held ones are known to have.

A block may have several holders, each named by a word such as "sequence"; then nobody may write into it. One
that was kept under a name and lost its last holder counts as free, and its content can be reused until
the block is handed out anew: uncached blocks go first, then the one that was let go longest ago.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvpact.errors import Exhausted
from kvpact.kvcache.cached_block import CachedBlock, Granted, Reuse
from kvpact.types import BlockCounts, BlockId

RETRY_AFTER_S = 1.0


class BlockPool:
    """Blocks [0, total). Every method may be called from any thread."""

    def __init__(self, total: int) -> None:
        assert total >= 1
        self._total = total
        self._lock = threading.Lock()
        self._free = [BlockId(block) for block in reversed(range(total))]
        """Free and without known content."""
        self._reusable: OrderedDict[BlockId, None] = OrderedDict()
        """Free with known content, least recently let go first."""
        self._holders: dict[BlockId, dict[str, int]] = {}
        self._held: Counter[str] = Counter()
        """Blocks of each holder, one with several shares of it counted once."""
        self._kept: dict[BlockId, CachedBlock] = {}
        self._by_name: dict[bytes, CachedBlock] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def total(self) -> int:
        """Blocks in all."""
        return self._total

    def allocate(self, count: int, holder: str) -> tuple[BlockId, ...]:
        """Gives `count` blocks to `holder`, all or none; the caller owns them until `free`.

        Raises:
            Exhausted: fewer than `count` blocks are free.
        """
        return self.grant(count, holder).blocks

    def grant(self, count: int, holder: str, *, reuse: Reuse | None = None, leave_free: int = 0) -> Granted:
        """Gives `count` blocks to `holder`, all or none, the first of them shared where `reuse` finds some.

        Args:
            leave_free: blocks that stay free; fewer left is refused.

        Raises:
            Exhausted: too few blocks are free.
        """
        assert count >= 0
        with self._lock:
            shared = self._found(reuse)[:count]
            free = self._free_count() - sum(entry.block in self._reusable for entry in shared)
            needed = count - len(shared)
            if needed > free - leave_free:
                kept = f", {leave_free} stay so" if leave_free else ""
                raise Exhausted(
                    f"{needed} KV blocks wanted for {holder}, {free} of {self._total} are free{kept}",
                    retry_after_s=RETRY_AFTER_S,
                )
            for entry in shared:
                self._reusable.pop(entry.block, None)
                self._add(entry.block, holder)
            # Neighbours in a row are read and written in one piece.
            anew = tuple(sorted(self._take() for _ in range(needed)))
            for block in anew:
                self._add(block, holder)
            return Granted(blocks=(*(entry.block for entry in shared), *anew), reused=tuple(shared))

    def keep(self, entry: CachedBlock, behind: Sequence[CachedBlock] = ()) -> bool:
        """Makes the content of a held block known by its name; whether it is now.

        Content that is known already, in a block that has all that this one has, stays where it is. A block
        of which less is whole loses the name to this one.

        Args:
            behind: shared blocks that it was computed from; where one was forgotten meanwhile, so is this.
        """
        with self._lock:
            assert entry.block in self._holders, f"block {entry.block} is free"
            if any(self._kept.get(shared.block) is not shared for shared in behind):
                return False
            known = self._by_name.get(entry.name)
            if known is not None and known.whole_groups >= entry.whole_groups:
                return known.block == entry.block
            if known is not None:
                self._forget(known)
            if entry.block in self._kept:
                self._forget(self._kept[entry.block])
            self._kept[entry.block] = entry
            self._by_name[entry.name] = entry
            return True

    def forget(self, doubtful: Callable[[CachedBlock], bool]) -> int:
        """Makes content unknown, in blocks held and free; how many blocks it was. Their holders keep them."""
        with self._lock:
            entries = [entry for entry in self._kept.values() if doubtful(entry)]
            for entry in entries:
                self._forget(entry)
            return len(entries)

    def move(self, blocks: Iterable[BlockId], source: str, target: str) -> None:
        """Names `target` in `source`'s place among the holders of each block."""
        with self._lock:
            for block in blocks:
                self._let_go(block, source, "is free")
                self._add(block, target)

    def free(self, blocks: Iterable[BlockId], holder: str) -> None:
        """Takes `holder`'s share of each block back, then tells the listeners."""
        returned = tuple(blocks)
        with self._lock:
            # The end of a prompt is worth less than its beginning, so it is let go first.
            for block in reversed(returned):
                self._let_go(block, holder, "freed twice")
                if block in self._holders:
                    continue
                if block in self._kept:
                    self._reusable[block] = None
                else:
                    self._free.append(block)
            listeners = tuple(self._listeners) if returned else ()
        for listener in listeners:
            listener()

    def on_free(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after each free, on the freeing thread with no lock held; gives its off switch."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop

    def counts(self) -> BlockCounts:
        """Free blocks, those among them whose content can be reused, held ones by holder, blocks in all."""
        with self._lock:
            return BlockCounts(
                free=self._free_count(),
                total=self._total,
                held=tuple(sorted(self._held_now().items())),
                cached=len(self._reusable),
            )

    def held(self) -> dict[str, int]:
        """Blocks held, by holder; one with several holders counts for each; holders of none are left out."""
        with self._lock:
            return self._held_now()

    def _held_now(self) -> dict[str, int]:
        return {holder: count for holder, count in self._held.items() if count}

    def _free_count(self) -> int:
        return len(self._free) + len(self._reusable)

    def _found(self, reuse: Reuse | None) -> Sequence[CachedBlock]:
        """The blocks that `reuse` takes of those whose names are known."""
        if reuse is None:
            return ()
        chain: list[CachedBlock] = []
        for name in reuse.names:
            entry = self._by_name.get(name)
            if entry is None:
                break
            chain.append(entry)
        return chain[: reuse.choose(chain)]

    def _take(self) -> BlockId:
        """A free block whose content nobody knows any more."""
        if not self._free:
            self._forget(self._kept[next(iter(self._reusable))])
        return self._free.pop()

    def _forget(self, entry: CachedBlock) -> None:
        del self._kept[entry.block]
        del self._by_name[entry.name]
        if entry.block in self._reusable:
            del self._reusable[entry.block]
            self._free.append(entry.block)

    def _add(self, block: BlockId, holder: str) -> None:
        """One share more of `holder`."""
        holders = self._holders.setdefault(block, {})
        shares = holders.get(holder, 0)
        holders[holder] = shares + 1
        if not shares:
            self._held[holder] += 1

    def _let_go(self, block: BlockId, holder: str, problem: str) -> None:
        """One share less of `holder`."""
        holders = self._holders.get(block)
        assert holders, f"block {block} {problem}: {holder} holds none"
        assert holder in holders, f"block {block} {problem}: {holder} holds none"
        holders[holder] -= 1
        if not holders[holder]:
            del holders[holder]
            self._held[holder] -= 1
        if not holders:
            del self._holders[block]
