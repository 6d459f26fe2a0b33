"""Handoffs that this reader holds: the one owner of their blocks until they are taken or end.

A block goes back to the pool exactly once, and never while a job may write into it. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvpact.clock import Clock
from kvpact.contract.content_identity import ContentId
from kvpact.errors import Fenced, UnknownHandoff
from kvpact.handoff.landing import LandingHandle
from kvpact.handoff.lease import Graveyard, LeaseTable, Tombstone
from kvpact.handoff.lease_timer import CallLater, LeaseTimer
from kvpact.handoff.messages import Commit, HandoffState, HandoffTerms, Reservation, WitnessReport
from kvpact.handoff.pairing import Judged
from kvpact.handoff.session import Session
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock
from kvpact.types import BlockId, HandoffId, WorkerLife

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    """How long and how much a receiver holds."""

    lease_s: float = 30.0
    chunk_cap_bytes: int = 3 << 20
    region_chunk_bytes: int = 16 << 20
    """Largest chunk that travels in a region and not in a message."""
    growth_watermark_blocks: int = 4
    """Blocks that Reserve leaves free, so that running sequences can grow."""
    retry_after_s: float = 1.0
    tombstone_s: float = 600.0
    tombstones: int = 16384
    reuse_prefixes: bool = True
    """Whether what lies here already needn't be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverCounters:
    """Handoffs of this process life."""

    committed: int = 0
    failed: int = 0
    """Ended before the commit, for whatever reason."""
    expired: int = 0
    """Ended by their lease, committed or not."""
    landed_bytes: int = 0
    """Payload of committed handoffs."""
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up among cached blocks, at each Reserve that was granted."""
    prefix_hit_tokens: int = 0
    """Those that were found."""


@dataclass(slots=True, kw_only=True)
class HeldHandoff:
    """One handoff between Reserve and its end. `state` is RESERVED or COMMITTED while it is in the table."""

    terms: HandoffTerms
    max_output_tokens: int
    reservation: Reservation
    judged: Judged
    session: Session
    blocks: tuple[BlockId, ...]
    """In order; those of the held prefix are shared with others and never written."""
    names: tuple[ContentId, ...] = ()
    """Of the prompt's whole blocks; empty where the handoff neither takes nor leaves cached ones."""
    state: HandoffState = HandoffState.RESERVED
    commit: Commit | None = None
    handle: LandingHandle | None = None
    witnessed: WitnessReport | None = None
    """Set once the witnesses hold."""
    scope: asyncio.Timeout | None = None
    """Ends the running push when the handoff ends."""
    work: asyncio.Future[None] | None = None
    """The last job on an executor thread; at most one runs."""
    ended: str | None = None
    """Why it ended, for people."""

    @property
    def holder(self) -> str:
        """Under which name the pool knows the holder of its blocks."""
        return "canary" if self.terms.canary else "handoff"


class HandoffTable:
    """Owns handoffs, their leases and their tombstones."""

    def __init__(
        self, *, pool: BlockPool, clock: Clock, limits: ReceiverLimits, call_later: CallLater
    ) -> None:
        self._pool = pool
        self.on_end: Callable[[HandoffId], None] = _tell_nobody
        """Called once per handoff that is held no more, also by being taken."""
        self._clock = clock
        self._held: dict[HandoffId, HeldHandoff] = {}
        self._freeing = 0
        self._leases = LeaseTable(limits.lease_s)
        self._graveyard = Graveyard(keep_s=limits.tombstone_s, most=limits.tombstones)
        self._timer = LeaseTimer(clock=clock, on_due=self.sweep, call_later=call_later)
        self.counters = ReceiverCounters()

    def add(self, handoff: HeldHandoff) -> None:
        """Takes a handoff and the ownership of its blocks."""
        self._held[handoff.terms.handoff_id] = handoff
        if handoff.names:
            tokens, held = len(handoff.terms.token_ids), handoff.reservation.held_prefix_tokens
            self._count(prefix_query_tokens=tokens, prefix_hit_tokens=held)
        self.renew(handoff)

    def get(self, handoff_id: HandoffId) -> HeldHandoff | None:
        """The handoff, if it is held."""
        return self._held.get(handoff_id)

    def find(self, handoff_id: HandoffId) -> HeldHandoff:
        """The handoff.

        Raises:
            Fenced: Decode took it.
            UnknownHandoff: it ended, or was never reserved; says which.
        """
        handoff = self._held.get(handoff_id)
        if handoff is not None:
            return handoff
        stone = self.tombstone(handoff_id)
        if stone is not None and stone.state is HandoffState.DECODING:
            found = "already decoding"
            raise Fenced(
                "the handoff was taken by Decode before", expected="a handoff not yet taken", found=found
            )
        problem = "was never reserved here" if stone is None else f"ended: {stone.reason}"
        raise UnknownHandoff(f"handoff {handoff_id.hex()} {problem}", handoff_id=handoff_id)

    def held(self) -> Iterable[HeldHandoff]:
        """All handoffs held now."""
        return tuple(self._held.values())

    def tombstone(self, handoff_id: HandoffId) -> Tombstone | None:
        """How a handoff ended, if it did not long ago."""
        return self._graveyard.find(handoff_id, self._clock.now())

    def renew(self, handoff: HeldHandoff) -> None:
        """Gives the handoff a whole lease from now on."""
        self._leases.renew(handoff.terms.handoff_id, self._clock.now())
        self._timer.arm(self._leases.next_expiry())

    def commit(self, handoff: HeldHandoff, commit: Commit, cached: Iterable[CachedBlock] = ()) -> None:
        """Makes the cache takeable, in one step, and its whole blocks `cached` known to later prompts."""
        assert handoff.ended is None
        for entry in cached:
            self._pool.keep(entry)
        handoff.state, handoff.commit = HandoffState.COMMITTED, commit
        self._count(committed=1, landed_bytes=handoff.session.payload_bytes)
        self.renew(handoff)

    def take(self, handoff: HeldHandoff, holder: str) -> tuple[BlockId, ...]:
        """Passes the ownership of a committed handoff's blocks to the caller."""
        assert handoff.state is HandoffState.COMMITTED
        self._remove(handoff, HandoffState.DECODING, "taken by Decode")
        self._pool.move(handoff.blocks, handoff.holder, holder)
        return handoff.blocks

    def lend(self, handoff: HeldHandoff, holder: str) -> tuple[BlockId, ...]:
        """Passes the blocks of a canary to the caller, who frees them; the handoff stays held without any."""
        blocks, handoff.blocks = handoff.blocks, ()
        self._pool.move(blocks, handoff.holder, holder)
        return blocks

    def forget(self, writer: WorkerLife) -> None:
        """Makes what one life of a writer landed unknown to later prompts, since it is in doubt.

        What it still lands will be checked and decoded, and isn't kept either.
        """
        self._pool.forget(lambda entry: writer in entry.origins)
        for handoff in self.held():
            if handoff.terms.writer == writer:
                handoff.names = ()

    def end_canary(self, handoff: HeldHandoff) -> None:
        """Forgets a canary that was judged. It counts nowhere, and Decode never finds it."""
        if handoff.ended is None:
            self._remove(handoff, HandoffState.RELEASED, "it was a canary, which is judged and not decoded")

    def end(self, handoff: HeldHandoff, reason: str) -> None:
        """Ends a handoff at any state; blocks go back at once or when its running job is done. Idempotent."""
        if handoff.ended is not None:
            return
        if handoff.state is HandoffState.RESERVED and not handoff.terms.canary:
            self._count(failed=1)
        logger.info("handoff %s, %s, ended: %s", handoff.terms.handoff_id.hex(), handoff.state.value, reason)
        self._remove(handoff, HandoffState.RELEASED, reason)
        if handoff.scope is not None:
            handoff.scope.reschedule(asyncio.get_running_loop().time())
        if handoff.work is None:
            self._pool.free(handoff.blocks, handoff.holder)
        elif handoff.work.done():
            self._free_after(handoff, handoff.work)
        else:
            self._freeing += 1
            handoff.work.add_done_callback(lambda work: self._free_late(handoff, work))

    def bury(self, handoff_id: HandoffId, reason: str) -> None:
        """Keeps a handoff that was never seen from being reserved later."""
        self._graveyard.bury(
            handoff_id, Tombstone(state=HandoffState.RELEASED, reason=reason), self._clock.now()
        )

    def sweep(self) -> None:
        """Ends every handoff whose lease is over; sets the alarm for the next."""
        for handoff_id in self._leases.expired(self._clock.now()):
            self._count(expired=not self._held[handoff_id].terms.canary)
            self.end(self._held[handoff_id], "its lease expired")
        self._timer.arm(self._leases.next_expiry())

    def close(self) -> None:
        """Ends everything."""
        self._timer.close()
        for handoff in self.held():
            self.end(handoff, "the worker stops")

    def freeing(self) -> int:
        """Handoffs that ended while a job still writes into their blocks."""
        return self._freeing

    def _remove(self, handoff: HeldHandoff, state: HandoffState, reason: str) -> None:
        handoff_id = handoff.terms.handoff_id
        handoff.ended, handoff.state = reason, state
        del self._held[handoff_id]
        self._leases.drop(handoff_id)
        self.on_end(handoff_id)
        self._graveyard.bury(handoff_id, Tombstone(state=state, reason=reason), self._clock.now())

    def _free_late(self, handoff: HeldHandoff, work: asyncio.Future[None]) -> None:
        self._freeing -= 1
        self._free_after(handoff, work)

    def _free_after(self, handoff: HeldHandoff, work: asyncio.Future[None]) -> None:
        """Gives the blocks back; an error of the last job has nobody left to go to but the log."""
        if work.exception() is not None:
            logger.info("handoff %s: last job failed: %s", handoff.terms.handoff_id.hex(), work.exception())
        self._pool.free(handoff.blocks, handoff.holder)

    def _count(self, **more: int) -> None:
        """Adds to the counters by name."""
        counted = self.counters
        self.counters = replace(
            counted, **{name: getattr(counted, name) + count for name, count in more.items()}
        )


def _tell_nobody(handoff_id: HandoffId) -> None:
    """For a table without anybody who waits for ends."""
