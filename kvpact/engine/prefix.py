"""Sequences of one engine and its cached blocks: which they may share, and which of theirs others may."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvpact.contract.content_identity import NameMaker, kept_offset, own_passage
from kvpact.contract.contract import Contract
from kvpact.contract.reach import first_reachable
from kvpact.contract.witness_places import Place
from kvpact.engine.requests import WitnessRow
from kvpact.engine.running import Running
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock, Reuse, reach_of_prefix


class PrefixCache:
    """Whole blocks of equal content, taken and left. Its owner calls it under one lock."""

    def __init__(self, contract: Contract, pool: BlockPool) -> None:
        self._contract = contract
        self._pool = pool
        self._block_size = contract.layout.block_size
        self._makes = NameMaker(contract, own_passage(contract), self._block_size)
        self._all_groups = frozenset(range(len(contract.layer_groups)))
        self.query_tokens = 0
        """Prompt tokens that were looked up, a sequence's second admission left out."""
        self.hit_tokens = 0
        """Those that were found."""

    def wanted(self, sequence: Running) -> Reuse | None:
        """What a sequence that is about to begin would share; names its blocks. None: it computes everything.

        A sequence that is handed over computes the block of its last token, whose rows it has to show.
        """
        if not sequence.request.reuses_prefixes:
            return None
        tokens = sequence.tokens
        positions = sequence.positions(len(tokens))
        if len(sequence.names) != len(tokens) // self._block_size:
            sequence.names = self._makes.names(tokens, positions, sequence.request.table_length)
        last = len(tokens) - 1 if sequence.request.hold_blocks else len(tokens)
        return Reuse(
            names=sequence.names[: last // self._block_size],
            choose=lambda chain: self._usable(chain, positions),
        )

    def begin(self, sequence: Running, reused: tuple[CachedBlock, ...]) -> tuple[Place, ...]:
        """Takes note of what a sequence shares; the rows to capture of blocks that it leaves to others."""
        sequence.reused, sequence.kept_blocks = reused, len(reused)
        sequence.computed = len(reused) * self._block_size
        if sequence.names and len(sequence.tokens) == len(sequence.request.token_ids):
            self.query_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.computed
        blocks = range(len(reused), len(sequence.names))
        return tuple(place for block in blocks for place in self._kept_places(sequence, block))

    def keep(self, sequence: Running) -> None:
        """Makes whole blocks that were computed known; they are never written again."""
        for block in range(sequence.kept_blocks, min(self._whole(sequence), len(sequence.names))):
            assert sequence.tap is not None, "rows of blocks with names are captured"
            self._pool.keep(
                CachedBlock(
                    name=sequence.names[block],
                    block=sequence.blocks[block],
                    whole_groups=self._all_groups,
                    rows={
                        place.layer: sequence.tap.copied(place)
                        for place in self._kept_places(sequence, block)
                    },
                    origins=frozenset().union(*(shared.origins for shared in sequence.reused)),
                ),
                behind=sequence.reused,
            )
            sequence.kept_blocks = block + 1

    def shown_rows(self, sequence: Running) -> tuple[WitnessRow, ...]:
        """Rows of `sequence.shown` that lie in shared blocks, as they were captured."""
        found = []
        for place in sequence.shown:
            if place.token >= len(sequence.reused) * self._block_size:
                continue
            rows = sequence.reused[place.token // self._block_size].rows
            row = None if rows is None else rows.get(place.layer)
            assert isinstance(row, WitnessRow), "what this engine computed has its rows"
            assert row.place == place, "both sides pick the row that was kept"
            found.append(row)
        return tuple(found)

    def _whole(self, sequence: Running) -> int:
        return sequence.computed // self._block_size

    def _kept_places(self, sequence: Running, block: int) -> tuple[Place, ...]:
        token = block * self._block_size + kept_offset(sequence.names[block], self._block_size)
        return tuple(Place(layer=layer, token=token) for layer in range(self._contract.layer_count()))

    def _usable(self, chain: Sequence[CachedBlock], positions: Sequence[int]) -> int:
        """Blocks of `chain` that have all that the token behind them, or the last one again, attends to."""
        last = len(positions) - 1

        def needed_from(group: int, tokens: int) -> int:
            position = positions[min(tokens, last)]
            return bisect_left(positions, first_reachable(self._contract.layer_groups[group], position))

        return reach_of_prefix(chain, self._block_size, len(self._all_groups), needed_from)
