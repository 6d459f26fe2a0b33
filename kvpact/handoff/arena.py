"""Which bytes of a fixed area are free: first fit, aligned, neighbours merged. Knows no memory."""

from __future__ import annotations

from kvpact.handoff.region_layout import ALIGNMENT


class Arena:
    """Offsets [0, size_bytes) in runs."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        """Runs [start, end), ascending, with something between two of them."""
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int | None:
        """Offset of a run of at least `size_bytes`; None where no free run is as long."""
        wanted = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        for index, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                self._free[index : index + 1] = [(start + wanted, end)] if end - start > wanted else []
                self._taken[start] = start + wanted
                return start
        return None

    def give(self, offset: int) -> int:
        """Gives a taken run back; its length in bytes. Raises KeyError where it isn't taken."""
        end = self._taken.pop(offset)
        runs = sorted([*self._free, (offset, end)])
        merged = [runs[0]]
        for start, stop in runs[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged
        return end - offset

    def length(self, offset: int) -> int:
        """Bytes of a taken run."""
        return self._taken[offset] - offset

    def free_bytes(self) -> int:
        """In all runs together."""
        return sum(end - start for start, end in self._free)
