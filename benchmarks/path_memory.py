"""A plain copy within one process, on one thread: what any landing on this machine is measured against."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from benchmarks.ends import Facts


class FarEnd:
    """Nothing: a copy has one process."""

    async def open(self, most_bytes: int) -> Facts:
        """See Far."""
        return {}

    async def expect(self, payload_bytes: int) -> None:
        """See Far."""

    async def close(self) -> None:
        """See Far."""


class NearEnd:
    """Copies from one buffer to another whose pages are there already."""

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """See Near."""
        self._source = np.full(most_bytes, 1, dtype=np.uint8)
        self._target = np.full(most_bytes, 2, dtype=np.uint8)

    async def carry(self, payload_bytes: int) -> float:
        """See Near."""
        start_s = perf_counter()
        np.copyto(self._target[:payload_bytes], self._source[:payload_bytes])
        return perf_counter() - start_s

    async def close(self) -> None:
        """See Near."""
