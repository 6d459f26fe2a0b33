"""A plain gRPC client stream of generated messages: no checks, no cache, malloc tuned on both ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import grpc
import numpy as np

from benchmarks.ends import Facts
from kvpact.handoff.malloc import tune_malloc
from kvpact.v1 import decode_pb2 as pb

SERVICE, METHOD = "benchmark.Plain", "Take"


class FarEnd:
    """Counts what arrives, and keeps none of it."""

    def __init__(self, message_bytes: int) -> None:
        """`message_bytes` is the near end's to use."""

    async def open(self, most_bytes: int) -> Facts:
        """See Far."""
        tune_malloc()
        handler = grpc.stream_unary_rpc_method_handler(
            _take, pb.PushRequest.FromString, pb.PushChunk.SerializeToString
        )
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return {"port": port}

    async def expect(self, payload_bytes: int) -> None:
        """See Far."""

    async def close(self) -> None:
        """See Far."""
        self._server.stop(None)


class NearEnd:
    """Sends slices of a buffer."""

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """See Near."""
        tune_malloc()
        self._buffer = np.full(most_bytes, 1, dtype=np.uint8).data.cast("B")
        self._channel = grpc.insecure_channel(f"127.0.0.1:{facts['port']}")
        self._take = self._channel.stream_unary(
            f"/{SERVICE}/{METHOD}",
            request_serializer=pb.PushRequest.SerializeToString,
            response_deserializer=pb.PushChunk.FromString,
        )

    async def carry(self, payload_bytes: int) -> float:
        """See Near."""
        return await asyncio.to_thread(self._carry, payload_bytes)

    async def close(self) -> None:
        """See Near."""
        self._channel.close()

    def _carry(self, payload_bytes: int) -> float:
        start_s = perf_counter()
        answer = self._take(self._messages(payload_bytes))
        spent_s = perf_counter() - start_s
        if answer.checksum != payload_bytes:
            raise ConnectionError(f"{answer.checksum} of {payload_bytes} bytes arrived")
        return spent_s

    def _messages(self, payload_bytes: int) -> Iterator[pb.PushRequest]:
        for at in range(0, payload_bytes, self._message_bytes):
            payload = bytes(self._buffer[at : min(at + self._message_bytes, payload_bytes)])
            yield pb.PushRequest(chunk=pb.PushChunk(payload=payload))


def _take(requests: Iterator[pb.PushRequest], _: Any) -> pb.PushChunk:
    """How many bytes came, in the one number that the message has."""
    return pb.PushChunk(checksum=sum(len(request.chunk.payload) for request in requests))
