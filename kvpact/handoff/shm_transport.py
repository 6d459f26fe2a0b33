"""Shared memory as a transport: one segment to a handoff, kept warm by its writer, mapped by its reader."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from kvpact.clock import new_nonce
from kvpact.errors import KvpactError
from kvpact.handoff.lease_timer import Alarm, CallLater, loop_call_later
from kvpact.handoff.region_layout import check_inside
from kvpact.handoff.regions import NixlRegion, ShmSegment
from kvpact.handoff.shm_segment import SUPPORTED, UNSUPPORTED, ForeignSegment, OwnSegment, same_file
from kvpact.handoff.transport_choice import SHM, TransportOffer

logger = logging.getLogger(__name__)

TRIAL_BYTES = 4096
IDLE_S = 10.0
"""How long a reader keeps a mapping that nobody uses."""
SIZE_STEP_BYTES = 4 << 20
"""Sizes are multiples of it, so that a segment fits the next prompt too."""


class ShmCarrier:
    """A Carrier. Pages of a fresh segment fault one by one, which halves its speed: used ones are kept warm.

    A segment serves another handoff only after the reader said that it is done with the one before; else it
    is dropped, and the kernel takes it back when the reader lets go.
    """

    def __init__(self, *, most_bytes: int) -> None:
        """`most_bytes`: of segments that wait for the next handoff; those in use don't count."""
        self._most_bytes = most_bytes
        self._idle: list[OwnSegment] = []
        self._in_use_bytes = 0
        self.dropped_bytes = 0
        """Of segments whose reader never said that it was done."""

    async def load(self, region: NixlRegion | None, size_bytes: int, chunk_bytes: int) -> ShmCargo:
        """See Carrier; raises Unavailable where the system gives no more memory files."""
        assert region is None, "a segment is the writer's own"
        segment = self._take(size_bytes)
        self._in_use_bytes += segment.size_bytes
        return ShmCargo(self, segment)

    def give_back(self, segment: OwnSegment, *, acknowledged: bool) -> None:
        """Ends a segment's handoff."""
        self._in_use_bytes -= segment.size_bytes
        if not acknowledged:
            self.dropped_bytes += segment.size_bytes
            logger.warning("a segment of %d bytes is dropped: its reader never answered", segment.size_bytes)
            segment.close()
            return
        self._idle.append(segment)
        while sum(kept.size_bytes for kept in self._idle) > self._most_bytes:
            self._idle.pop(0).close()

    def idle_bytes(self) -> int:
        """Of segments that wait for a handoff."""
        return sum(segment.size_bytes for segment in self._idle)

    def in_use_bytes(self) -> int:
        """Of segments that belong to a handoff."""
        return self._in_use_bytes

    def close(self) -> None:
        """Lets every waiting segment go. Idempotent."""
        while self._idle:
            self._idle.pop().close()

    def _take(self, size_bytes: int) -> OwnSegment:
        fitting = [segment for segment in self._idle if segment.size_bytes >= size_bytes]
        if not fitting:
            size_bytes = -(-size_bytes // SIZE_STEP_BYTES) * SIZE_STEP_BYTES
            return OwnSegment(size_bytes, new_nonce())
        segment = min(fitting, key=lambda each: each.size_bytes)
        self._idle.remove(segment)
        segment.rename(new_nonce())
        return segment


class ShmCargo:
    """See Cargo. What is written is there: nothing has to be shipped."""

    chunks_ahead = 16

    def __init__(self, carrier: ShmCarrier, segment: OwnSegment) -> None:
        self._carrier = carrier
        self._segment: OwnSegment | None = segment
        self.segment: ShmSegment | None = segment.told()

    def space(self, offset: int, size_bytes: int) -> memoryview:
        """See Cargo."""
        assert self._segment is not None, "the cargo is closed"
        return self._segment.space(offset, size_bytes)

    async def ship(self, offset: int, size_bytes: int) -> None:
        """See Cargo."""

    def still(self) -> bool:
        """See Cargo: only the writer's own threads write."""
        return True

    def close(self, *, acknowledged: bool) -> None:
        """See Cargo."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._carrier.give_back(segment, acknowledged=acknowledged)


class ShmReader:
    """Regions in segments of writers. Mapping one anew for each handoff would cost more than checks and copy.

    A mapping is kept for the next handoff in the same segment, while its writer lives and keeps it; after a
    push that failed, and IDLE_S after the last, none is. Used from one event loop.
    """

    def __init__(self, *, most_bytes: int, call_later: CallLater = loop_call_later) -> None:
        """`most_bytes`: of mappings that wait for the next handoff."""
        self._most_bytes = most_bytes
        self._call_later = call_later
        self._idle: list[ForeignSegment] = []
        self._alarm: Alarm | None = None

    def open(self, told: ShmSegment, most_bytes: int) -> ShmRegion:
        """The region of one handoff, of at most `most_bytes`.

        Raises:
            BadRequest, Unavailable: see ForeignSegment.
        """
        self._drop(lambda segment: not segment.is_still_open())
        identity = same_file(told)
        for segment in self._idle:
            if segment.identity == identity and (segment.pid, segment.size_bytes) == (
                told.pid,
                told.size_bytes,
            ):
                segment.check_token(told)
                self._idle.remove(segment)
                return ShmRegion(self, segment, min(told.size_bytes, most_bytes))
        return ShmRegion(self, ForeignSegment(told), min(told.size_bytes, most_bytes))

    def give_back(self, segment: ForeignSegment, *, reusable: bool) -> None:
        """Ends a segment's handoff."""
        if not reusable:
            segment.close()
            self._drop(lambda idle: idle.pid == segment.pid)
            return
        self._idle.append(segment)
        while self.idle_bytes() > self._most_bytes:
            self._idle.pop(0).close()
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._call_later(IDLE_S, self.close)

    def idle_bytes(self) -> int:
        """Of mappings that wait for a handoff."""
        return sum(segment.size_bytes for segment in self._idle)

    def close(self) -> None:
        """Lets every waiting mapping go. Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._drop(lambda _: True)

    def _drop(self, which: Callable[[ForeignSegment], bool]) -> None:
        for segment in [idle for idle in self._idle if which(idle)]:
            self._idle.remove(segment)
            segment.close()


class ShmRegion:
    """See Region."""

    def __init__(self, reader: ShmReader, segment: ForeignSegment, length: int) -> None:
        self._reader = reader
        self._segment: ForeignSegment | None = segment
        self._length = length

    def check(self, offset: int, size_bytes: int) -> None:
        """See Region."""
        check_inside(offset, size_bytes, self._length)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """See Region."""
        assert self._segment is not None, "the region is closed"
        check_inside(offset, size_bytes, self._length)
        return self._segment.view(offset, size_bytes)

    def close(self, *, reusable: bool) -> None:
        """See Region."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._reader.give_back(segment, reusable=reusable)


def shm_offer() -> TransportOffer:
    """What a writer says before any reader tried."""
    reason = "" if SUPPORTED else UNSUPPORTED
    return TransportOffer(name=SHM, available=SUPPORTED, reason=reason)


@contextlib.contextmanager
def trial_segment() -> Iterator[ShmSegment | None]:
    """A small segment for a reader to try; None where there is none to make."""
    try:
        segment = OwnSegment(TRIAL_BYTES, new_nonce())
    except KvpactError:
        yield None
        return
    try:
        yield segment.told()
    finally:
        segment.close()


def try_segment(trial: ShmSegment | None) -> TransportOffer:
    """What a reader says after it opened, or couldn't open, the writer's trial."""
    if not SUPPORTED:
        return TransportOffer(name=SHM, available=False, reason=UNSUPPORTED)
    if trial is None:
        return TransportOffer(name=SHM, available=False, reason="the prefill side named no segment to try")
    try:
        ForeignSegment(trial).close()
    except KvpactError as error:
        return TransportOffer(name=SHM, available=False, reason=str(error))
    return TransportOffer(
        name=SHM, available=True, reason="opened a segment of the prefill side and read its token"
    )
