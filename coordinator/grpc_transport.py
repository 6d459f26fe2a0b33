"""Ports over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from kvpact.errors import BadRequest, DataLoss, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.jobs import (
    DecodedTokens,
    DecodeJob,
    GenerateJob,
    Paired,
    Partner,
    PrefillEvent,
    PrefillJob,
)
from kvpact.handoff.messages import WorkerDescription
from kvpact.handoff.security_transport import PLAINTEXT, Link, Security
from kvpact.tls import PeerRole
from kvpact.types import HandoffId
from kvpact.v1 import decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc, prefill_pb2_grpc

CONNECT_DEADLINE_S = 60.0
"""Pairing includes the pair's probe."""
CALL_DEADLINE_S = 5.0

T = TypeVar("T")


class GrpcTransport:
    """Opens one channel per port."""

    def __init__(self, security: Security = PLAINTEXT) -> None:
        self._security = security

    def prefill_port(self, endpoint: str) -> GrpcPrefillPort:
        """See Transport."""
        return GrpcPrefillPort(self._security.link(endpoint, PeerRole.PREFILL))

    def decode_port(self, endpoint: str) -> GrpcDecodePort:
        """See Transport."""
        return GrpcDecodePort(self._security.link(endpoint, PeerRole.DECODE))


class RpcStream(Generic[T]):
    """See Stream. A call that ends because its port was closed raises Unavailable, not CancelledError."""

    def __init__(self, port: _GrpcPort, call: Any, decode: Callable[[Any], T]) -> None:
        self._port = port
        self._call = call
        self._decode = decode

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        message = await self._port.answer(self._call.read())
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._port.read(message, self._decode)

    async def aclose(self) -> None:
        """See Stream."""
        self._call.cancel()


class _GrpcPort:
    """What both roles answer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._endpoint = link.endpoint
        self._closed = False
        self._channel = link.channel
        self._worker = handoff_pb2_grpc.WorkerServiceStub(self._channel)

    async def release(self, handoff_id: HandoffId, reason: str) -> None:
        """See WorkerPort."""
        request = handoff_pb2.ReleaseRequest(handoff_id=handoff_id, reason=reason)
        await self.answer(self._worker.Release(request, timeout=CALL_DEADLINE_S))

    async def describe(self) -> WorkerDescription:
        """See WorkerPort."""
        request = handoff_pb2.DescribeRequest()
        response = await self.answer(self._worker.Describe(request, timeout=CALL_DEADLINE_S))
        return self.read(response, codec.decode_description)

    async def drain(self) -> int:
        """See WorkerPort."""
        request = handoff_pb2.DrainRequest()
        response = await self.answer(self._worker.Drain(request, timeout=CALL_DEADLINE_S))
        return int(response.running_requests)

    async def close(self) -> None:
        """See WorkerPort."""
        self._closed = True
        await self._channel.close()

    async def answer(self, call: Awaitable[T]) -> T:
        """Awaits a call or one of its messages; its failures are raised as KvpactError."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._link.failure(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise Unavailable(f"the worker at {self._endpoint} is gone") from error
            raise

    def read(self, message: Any, decode: Callable[[Any], T]) -> T:
        """Decodes a worker's message. One that can't be read is the worker's fault, not the user's."""
        try:
            return decode(message)
        except BadRequest as error:
            raise KvpactError(
                f"the worker at {self._endpoint} sent a message that can't be read: {error}"
            ) from error


class GrpcPrefillPort(_GrpcPort):
    """See PrefillPort."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(self._channel)

    async def connect(self, decode: Partner) -> Paired:
        """See PrefillPort."""
        request = codec.encode_connect(decode)
        response = await self.answer(self._stub.Connect(request, timeout=CONNECT_DEADLINE_S))
        paired = self.read(response, codec.decode_paired)
        canary = paired.canary
        if canary is not None and not canary.passed:
            raise DataLoss(f"the pair's probe failed: {canary.finding}", check="canary")
        return paired

    def prefill(self, job: PrefillJob) -> RpcStream[PrefillEvent]:
        """See PrefillPort."""
        call = self._stub.Prefill(codec.encode_prefill_job(job))
        return RpcStream(self, call, codec.decode_prefill_event)


class GrpcDecodePort(_GrpcPort):
    """See DecodePort."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)

    def decode(self, job: DecodeJob) -> RpcStream[DecodedTokens]:
        """See DecodePort."""
        return RpcStream(self, self._stub.Decode(codec.encode_decode_job(job)), codec.decode_decoded_tokens)

    def generate(self, job: GenerateJob) -> RpcStream[DecodedTokens]:
        """See DecodePort."""
        call = self._stub.Generate(codec.encode_generate_job(job))
        return RpcStream(self, call, codec.decode_decoded_tokens)
