"""Words between a pool and those who reuse cached content: what is known of a block, what is looked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpact.contract.content_identity import ContentId
from kvpact.types import BlockId, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """A whole block whose content is known."""

    name: ContentId
    block: BlockId
    whole_groups: frozenset[int]
    """Layer groups of the holder's contract of which every row lies in the block; a window may leave some
    with the writer."""
    origins: frozenset[WorkerLife] = frozenset()
    """Writers whose bytes lie in it, or in blocks that were attended to when it was computed here."""
    rows: Mapping[int, object] | None = None
    """Witness rows of one token, by layer, as the block's own engine captured them when it computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Content that a newcomer would share."""

    names: Sequence[ContentId]
    """Of its blocks, from the first on."""
    choose: Callable[[Sequence[CachedBlock]], int]
    """Given the known ones up to the first gap: how many to share. Called under the pool's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Blocks that have a new holder. The first ones, `reused`, are shared: they must not be written into."""

    blocks: tuple[BlockId, ...]
    reused: tuple[CachedBlock, ...]


def reach_of_prefix(
    chain: Sequence[CachedBlock],
    block_size: int,
    groups: int,
    needed_from: Callable[[int, int], int],
) -> int:
    """The largest number of blocks of `chain` of which each layer group has what will be attended to.

    Args:
        needed_from: (group, tokens of a prefix) -> first token of it that can still be reached.
    """
    broken = [-1] * groups
    best = 0
    for index, entry in enumerate(chain):
        for group in range(groups):
            if group not in entry.whole_groups:
                broken[group] = index
        tokens = (index + 1) * block_size
        if all((broken[group] + 1) * block_size <= needed_from(group, tokens) for group in range(groups)):
            best = index + 1
    return best
