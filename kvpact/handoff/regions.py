"""Payload beside the messages: a region per handoff that its writer fills and its reader looks into.

The writer's side of it is a cargo, made by a carrier; the reader's side is a region. Offsets count bytes from
the region's beginning; region_layout.py says where chunks lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmSegment:
    """A sealed memory file of a process on this host, as that process tells of it."""

    pid: int
    fd: int
    size_bytes: int
    token: bytes
    """First bytes of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlRegion:
    """Registered memory of the reader that belongs to one handoff."""

    address: int
    size_bytes: int


class Cargo(Protocol):
    """A handoff's region on the writer's side. Threads may fill one part while another is on its way."""

    @property
    def chunks_ahead(self) -> int:
        """Chunks that may be made while one is on its way, at least 1."""

    @property
    def segment(self) -> ShmSegment | None:
        """What Open tells of it; None where the reader knows the region."""

    def space(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes to fill, writable; valid until `close`."""

    async def ship(self, offset: int, size_bytes: int) -> None:
        """Returns when the reader sees what was filled in. Cancelled, it returns when nothing moves any more.

        Raises:
            Unavailable: the reader can't be reached.
        """

    def still(self) -> bool:
        """Whether nothing moves any more, so that the reader may give the region to another handoff."""

    def close(self, *, acknowledged: bool) -> None:
        """Ends the cargo. Idempotent. `acknowledged`: the reader said that it is done with the region."""


class Carrier(Protocol):
    """Makes cargos for one pair."""

    async def load(self, region: NixlRegion | None, size_bytes: int, chunk_bytes: int) -> Cargo:
        """Room for a handoff whose chunks take `size_bytes` with their gaps, each at most `chunk_bytes`.

        Args:
            region: what the reader granted; None where the writer's own memory is the region.

        Raises:
            Exhausted: there is no room now.
        """


class Region(Protocol):
    """A handoff's region on the reader's side."""

    def check(self, offset: int, size_bytes: int) -> None:
        """Raises BadRequest unless the bytes of a chunk lie inside; touches none."""

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of one chunk, checked again. Called on executor threads, one call at a time."""

    def close(self, *, reusable: bool) -> None:
        """Ends looking into it. Idempotent. `reusable`: the push went well, and another may follow."""
