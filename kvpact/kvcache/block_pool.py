"""Pool of fixed-size KV blocks. Knows who holds a block, never what is in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from kvpact.errors import Exhausted
from kvpact.types import BlockCounts, BlockId

RETRY_AFTER_S = 1.0


class BlockPool:
    """Blocks [0, total). Each is free or has exactly one holder, named by a word such as "sequence"."""

    def __init__(self, total: int) -> None:
        assert total >= 1
        self._total = total
        self._lock = threading.Lock()
        self._free = [BlockId(block) for block in reversed(range(total))]
        self._holders: dict[BlockId, str] = {}
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
        assert count >= 0
        with self._lock:
            if count > len(self._free):
                raise Exhausted(
                    f"{count} KV blocks wanted for {holder}, {len(self._free)} of {self._total} are free",
                    retry_after_s=RETRY_AFTER_S,
                )
            blocks = tuple(self._free.pop() for _ in range(count))
            self._holders.update(dict.fromkeys(blocks, holder))
            return blocks

    def move(self, blocks: Iterable[BlockId], holder: str) -> None:
        """Names a new holder for blocks that are held."""
        with self._lock:
            for block in blocks:
                assert block in self._holders, f"block {block} is free"
                self._holders[block] = holder

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Takes blocks back from whoever holds them, then tells the listeners."""
        returned = tuple(blocks)
        with self._lock:
            for block in returned:
                assert block in self._holders, f"block {block} freed twice"
                del self._holders[block]
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
        """Free blocks and blocks in all."""
        with self._lock:
            return BlockCounts(free=len(self._free), total=self._total)

    def held(self) -> dict[str, int]:
        """Blocks held, by holder; holders of none are left out."""
        with self._lock:
            return dict(Counter(self._holders.values()))
