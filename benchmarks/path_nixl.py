"""A bare NIXL write over UCX: registered memory to registered memory, no checks, progress threads off.

As one range, which is the best it can do, or as the parts of a paged cache: keys and values of each block
by a descriptor of its own, in another order on the far end.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.ends import Facts, Missing
from benchmarks.handoff_caches import PART_BYTES

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Either carries the same bindings; without a GPU they work on main memory."""


def make_agent(name: str) -> Any:
    """An agent with UCX and no progress thread. Raises Missing."""
    found = next((package for package in PACKAGES if importlib.util.find_spec(package)), None)
    if found is None:
        raise Missing("no NIXL package is installed; make install-nixl adds one on Linux")
    api = importlib.import_module(f"{found}._api")
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class FarEnd:
    """Owns the memory that is written to, and drives its agent while a write is expected."""

    def __init__(self, paged: bool) -> None:
        """`paged` is the near end's to use."""

    async def open(self, most_bytes: int) -> Facts:
        """See Far."""
        self._agent = make_agent("far")
        self._target = np.full(most_bytes, 2, dtype=np.uint8)
        address = self._target.ctypes.data
        self._registered = self._agent.register_memory([(address, most_bytes, 0, "target")], "DRAM")
        return {"agent": self._agent.get_agent_metadata().hex(), "address": address}

    async def expect(self, payload_bytes: int) -> None:
        """See Far."""
        await asyncio.to_thread(self._until_written)
        if self._target[payload_bytes - 1] != self._expected:
            raise ConnectionError("the write is told to be done, and its last byte isn't there")

    async def close(self) -> None:
        """See Far."""
        self._agent.deregister_memory(self._registered)

    def _until_written(self) -> None:
        """Polls, as whoever waits for a write does. The notification names the last byte."""
        while not (told := [one for all_ in self._agent.get_new_notifs().values() for one in all_]):
            pass
        self._expected = told[0][0]


class NearEnd:
    """Writes from registered memory; times descriptors, transfer and completion, not the registration."""

    def __init__(self, paged: bool) -> None:
        self._paged = paged

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """See Near."""
        self._agent = make_agent("near")
        self._source = np.full(most_bytes, 1, dtype=np.uint8)
        self._registered = self._agent.register_memory(
            [(self._source.ctypes.data, most_bytes, 0, "source")], "DRAM"
        )
        self._peer = self._agent.add_remote_agent(bytes.fromhex(facts["agent"]))
        self._from, self._to = self._source.ctypes.data, int(facts["address"])
        self._count = 0

    async def carry(self, payload_bytes: int) -> float:
        """See Near."""
        self._count += 1
        self._source[payload_bytes - 1] = mark = self._count % 251
        start_s = perf_counter()
        parts = self._parts(payload_bytes)
        source = self._agent.get_xfer_descs([(self._from + a, size, 0) for a, _, size in parts], "DRAM")
        target = self._agent.get_xfer_descs([(self._to + b, size, 0) for _, b, size in parts], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", source, target, self._peer, bytes([mark]))
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        spent_s = perf_counter() - start_s
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended in state {state}")
        return spent_s

    async def close(self) -> None:
        """See Near."""
        self._agent.deregister_memory(self._registered)

    def _parts(self, payload_bytes: int) -> list[tuple[int, int, int]]:
        """Offset here, offset there and size of each range; the last byte stays the last."""
        if not self._paged:
            return [(0, 0, payload_bytes)]
        last = (payload_bytes - 1) // PART_BYTES * PART_BYTES
        starts = range(0, last, PART_BYTES)
        parts = [(here, there, PART_BYTES) for here, there in zip(starts, reversed(starts), strict=True)]
        return [*parts, (last, last, payload_bytes - last)]
