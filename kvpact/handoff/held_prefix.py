"""What a reader's pool holds of a prompt already, and what a committed handoff adds to it.

A block counts under the name that the prompt's own writer would give it once landed here: by the writer's
function, tables and numbers, and by what this reader's plan for that writer does to them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kvpact.contract.content_identity import ContentId, NameMaker, landed_passage
from kvpact.contract.contract import Contract
from kvpact.handoff.chunks import tokens_before
from kvpact.handoff.handoff_table import HeldHandoff
from kvpact.handoff.messages import HandoffTerms
from kvpact.handoff.pairing import Judged
from kvpact.handoff.terms import positions_of, required_positions
from kvpact.kvcache.cached_block import CachedBlock, Reuse, reach_of_prefix
from kvpact.types import ContractDigest, Exactness

MAKERS_KEPT = 64


class HeldPrefixes:
    """Names and looks up blocks of handoffs; the pool keeps them."""

    def __init__(self, reader: Contract) -> None:
        self._reader = reader
        self._block_size = reader.layout.block_size
        self._makers: OrderedDict[tuple[ContractDigest, Exactness], NameMaker] = OrderedDict()

    def names(self, terms: HandoffTerms, judged: Judged) -> tuple[ContentId, ...]:
        """Names of the prompt's whole blocks, in the reader's block size."""
        key = terms.contract_digest, judged.verdict.exactness
        maker = self._makers.get(key)
        if maker is None:
            passage = landed_passage(judged.contract, self._reader, judged.verdict.exactness)
            maker = self._makers[key] = NameMaker(judged.contract, passage, self._block_size)
            while len(self._makers) > MAKERS_KEPT:
                self._makers.popitem(last=False)
        return maker.names(terms.token_ids, positions_of(terms.positions), terms.table_length)

    def wanted(self, terms: HandoffTerms, judged: Judged, names: Sequence[ContentId]) -> Reuse:
        """The longest prefix that is held, in whole blocks of both sides; the last token's block travels."""
        step = math.lcm(self._block_size, judged.contract.layout.block_size)
        most_tokens = (len(terms.token_ids) - 1) // step * step
        starts = [
            tokens_before(terms.positions, entry.start)
            for entry in required_positions(self._reader, terms.next_position)
        ]

        def choose(chain: Sequence[CachedBlock]) -> int:
            blocks = reach_of_prefix(chain, self._block_size, len(starts), lambda group, _: starts[group])
            return blocks * self._block_size // step * step // self._block_size

        return Reuse(names=names[: most_tokens // self._block_size], choose=choose)

    def entries(self, handoff: HeldHandoff) -> Iterator[CachedBlock]:
        """The whole blocks that a handoff landed, for the pool to keep."""
        held = handoff.reservation.held_prefix_tokens // self._block_size
        writer_size = handoff.judged.contract.layout.block_size
        landed_alike = handoff.session.landed_alike()
        for index in range(held, len(handoff.names)):
            start = index * self._block_size // writer_size
            stop = -(-(index + 1) * self._block_size // writer_size)
            yield CachedBlock(
                name=handoff.names[index],
                block=handoff.blocks[index],
                whole_groups=self._whole_groups(landed_alike, start, stop),
                origins=frozenset({handoff.terms.writer}),
            )

    def _whole_groups(
        self, landed_alike: Mapping[int, frozenset[int]], start: int, stop: int
    ) -> frozenset[int]:
        """The reader's groups whose layers all got the writer's blocks [start, stop)."""
        blocks = (1 << stop) - (1 << start)
        whole = (layers for landed, layers in landed_alike.items() if landed & blocks == blocks)
        layers = frozenset[int]().union(*whole)
        groups = enumerate(self._reader.layer_groups)
        return frozenset(index for index, group in groups if layers.issuperset(group.layers))
