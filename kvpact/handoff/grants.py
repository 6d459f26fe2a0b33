"""Room for one handoff on the reader's side: what is granted at Reserve, all of it or nothing.

Used from one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpact.clock import new_nonce
from kvpact.contract.content_identity import ContentId
from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest, Exhausted, KvpactError
from kvpact.handoff.chunks import block_count, layer_blocks
from kvpact.handoff.handoff_table import HeldHandoff, ReceiverLimits
from kvpact.handoff.held_prefix import HeldPrefixes
from kvpact.handoff.messages import HandoffTerms, Reservation
from kvpact.handoff.pairing import Judged
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.region_layout import region_bytes
from kvpact.handoff.session import Expected, new_session
from kvpact.handoff.transport_choice import GRPC
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What tells one grant from others; a replay gives what was recorded."""

    new_nonce: Callable[[], bytes] = new_nonce
    first_generation: int = 1


class Grants:
    """Gives handoffs their blocks; whoever adds the handoff to a table gives them back."""

    def __init__(
        self,
        *,
        contract: Contract,
        pool: BlockPool,
        limits: ReceiverLimits,
        marks: Marks | None,
        transports: ReaderTransports,
    ) -> None:
        """`contract`: of the reader."""
        self._block_size = contract.layout.block_size
        self._pool = pool
        self._limits = limits
        marks = marks or Marks()
        self._new_nonce = marks.new_nonce
        self._generation = marks.first_generation - 1
        self._transports = transports
        self.prefixes = HeldPrefixes(contract) if limits.reuse_prefixes else None
        """None: every prompt is sent as a whole."""

    def check_room(self, terms: HandoffTerms, max_output_tokens: int) -> None:
        """Refuses what could never be decoded to its end, before anything is computed for it.

        Raises:
            BadRequest: the whole pool is too small for it.
        """
        total = self._pool.total
        tokens = min(terms.table_length, len(terms.token_ids) + max_output_tokens) - 1
        if block_count(tokens, self._block_size) > total:
            raise BadRequest(
                f"{tokens} tokens can't fit in {total} blocks of {self._block_size}; "
                "ask for fewer tokens or raise decode.cache.blocks",
                param="max_tokens",
            )

    def grant(self, terms: HandoffTerms, max_output_tokens: int, judged: Judged) -> HeldHandoff:
        """A handoff with all its blocks, or none.

        Raises:
            BadRequest: the prompt is larger than the pool.
            Exhausted: too few blocks are free now.
        """
        names = self._names(terms, judged)
        blocks, held_tokens = self._allocate(terms, judged, names)
        self._generation += 1
        expected = self._expected(terms, judged.contract, held_tokens)
        try:
            nixl = self._transports.grant(terms, region_bytes(expected.layers, expected.block_count))
        except KvpactError:
            self._pool.free(blocks, _holder(terms))
            raise
        reservation = Reservation(
            handoff_id=terms.handoff_id,
            generation=self._generation,
            lease_s=self._limits.lease_s,
            held_prefix_tokens=held_tokens,
            chunk_cap_bytes=expected.chunk_cap_bytes,
            transports=self._transports.names(),
            nonce=self._new_nonce(),
            nixl=nixl,
        )
        return HeldHandoff(
            terms=terms,
            max_output_tokens=max_output_tokens,
            reservation=reservation,
            judged=judged,
            session=new_session(expected),
            blocks=blocks,
            names=names,
        )

    def _expected(self, terms: HandoffTerms, writer: Contract, held_tokens: int) -> Expected:
        """What the push may bring: nothing of the held prefix."""
        limits, size, tokens = self._limits, writer.layout.block_size, len(terms.token_ids)
        return Expected(
            handoff_id=terms.handoff_id,
            generation=self._generation,
            contract_digest=terms.contract_digest,
            block_count=block_count(tokens, size),
            layers=layer_blocks(writer, terms.required, terms.positions, held_tokens=held_tokens),
            chunk_cap_bytes=limits.chunk_cap_bytes if terms.transport == GRPC else limits.region_chunk_bytes,
            held_blocks=held_tokens // size,
            most_cached_tokens=(tokens - 1) // size * size,
            block_size=size,
        )

    def _names(self, terms: HandoffTerms, judged: Judged) -> tuple[ContentId, ...]:
        """Of the prompt's blocks; none for a probe, which neither takes nor leaves cached ones."""
        if self.prefixes is None or terms.canary:
            return ()
        return self.prefixes.names(terms, judged)

    def _allocate(
        self, terms: HandoffTerms, judged: Judged, names: tuple[ContentId, ...]
    ) -> tuple[tuple[BlockId, ...], int]:
        """Blocks for a prompt, in the reader's block size; how many tokens lie in the first of them already.

        Those of users leave some free for growth.
        """
        needed, total = block_count(len(terms.token_ids), self._block_size), self._pool.total
        if needed > total:
            raise BadRequest(
                f"the prompt takes {needed} blocks, the pool has {total}", param="terms.token_ids"
            )
        watermark = 0 if terms.canary else min(self._limits.growth_watermark_blocks, total - needed)
        reuse = None
        if self.prefixes is not None and names:
            reuse = self.prefixes.wanted(terms, judged, names)
        try:
            granted = self._pool.grant(needed, _holder(terms), reuse=reuse, leave_free=watermark)
        except Exhausted as error:
            raise Exhausted(str(error), retry_after_s=self._limits.retry_after_s) from None
        return granted.blocks, len(granted.reused) * self._block_size


def _holder(terms: HandoffTerms) -> str:
    return "canary" if terms.canary else "handoff"
