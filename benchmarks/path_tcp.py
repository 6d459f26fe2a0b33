"""Raw TCP over loopback: frames of 1 MiB received in place, one byte back when all are in."""

from __future__ import annotations

import asyncio
import socket
from time import perf_counter

import numpy as np

from benchmarks.ends import Facts

FRAME_BYTES = 1 << 20


class FarEnd:
    """Receives straight into a buffer whose pages are there already."""

    async def open(self, most_bytes: int) -> Facts:
        """See Far."""
        self._buffer = np.full(most_bytes, 2, dtype=np.uint8).data.cast("B")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        return {"port": self._listener.getsockname()[1]}

    async def expect(self, payload_bytes: int) -> None:
        """See Far."""
        await asyncio.to_thread(self._receive, payload_bytes)

    async def close(self) -> None:
        """See Far."""
        for held in (self._connection, self._listener):
            if held is not None:
                held.close()

    def _receive(self, payload_bytes: int) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at = 0
        while at < payload_bytes:
            frame = self._buffer[at : min(at + FRAME_BYTES, payload_bytes)]
            received = self._connection.recv_into(frame, len(frame), socket.MSG_WAITALL)
            if received == 0:
                raise ConnectionError(f"the stream ended after {at} of {payload_bytes} bytes")
            at += received
        self._connection.sendall(b"\x01")


class NearEnd:
    """Sends from a buffer."""

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """See Near."""
        self._buffer = np.full(most_bytes, 1, dtype=np.uint8).data.cast("B")
        self._connection = socket.create_connection(("127.0.0.1", facts["port"]))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def carry(self, payload_bytes: int) -> float:
        """See Near."""
        start_s = perf_counter()
        for at in range(0, payload_bytes, FRAME_BYTES):
            self._connection.sendall(self._buffer[at : min(at + FRAME_BYTES, payload_bytes)])
        if self._connection.recv(1) != b"\x01":
            raise ConnectionError("the far end closed the stream")
        return perf_counter() - start_s

    async def close(self) -> None:
        """See Near."""
        self._connection.close()
