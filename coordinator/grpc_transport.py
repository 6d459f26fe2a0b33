"""Ports over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from coordinator.ports import Committed, Paired, PrefillEvent, PrefillJob, RegisteredWorker, Reserved
from kvpact.errors import BadRequest, DataLoss, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.messages import DecodedTokens, DecodeJob, WorkerDescription
from kvpact.handoff.status import from_rpc_error
from kvpact.handoff.verdict_codec import EXACTNESSES
from kvpact.types import HandoffId
from kvpact.v1 import decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc, prefill_pb2, prefill_pb2_grpc

CONNECT_DEADLINE_S = 60.0
"""Pairing includes the pair's probe."""
CALL_DEADLINE_S = 5.0

T = TypeVar("T")


class GrpcTransport:
    """Opens one channel per port."""

    def prefill_port(self, endpoint: str) -> GrpcPrefillPort:
        """See Transport."""
        return GrpcPrefillPort(endpoint)

    def decode_port(self, endpoint: str) -> GrpcDecodePort:
        """See Transport."""
        return GrpcDecodePort(endpoint)


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

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._channel = grpc.aio.insecure_channel(endpoint)
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

    async def close(self) -> None:
        """See WorkerPort."""
        self._closed = True
        await self._channel.close()

    async def answer(self, call: Awaitable[T]) -> T:
        """Awaits a call or one of its messages; its failures are raised as KvpactError."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._endpoint) from error
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

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(self._channel)

    async def connect(self, decode: RegisteredWorker) -> Paired:
        """See PrefillPort."""
        request = prefill_pb2.ConnectRequest(
            decode_endpoint=decode.endpoint, decode=codec.encode_life(decode.life)
        )
        response = await self.answer(self._stub.Connect(request, timeout=CONNECT_DEADLINE_S))
        paired = self.read(response, _paired)
        canary = paired.canary
        if canary is not None and not canary.passed:
            raise DataLoss(f"the pair's probe failed: {canary.finding}", check="canary")
        return paired

    def prefill(self, job: PrefillJob) -> RpcStream[PrefillEvent]:
        """See PrefillPort."""
        request = prefill_pb2.PrefillRequest(
            handoff_id=job.handoff_id,
            prefill=codec.encode_life(job.prefill),
            token_ids=job.token_ids,
            table_length_tokens=job.table_length,
            sampling=codec.encode_sampling(job.sampling, original_prompt_tokens=job.original_prompt_tokens),
            request_id=job.request_id,
        )
        if job.decode is not None:
            request.decode.CopyFrom(codec.encode_life(job.decode.life))
            request.decode_endpoint = job.decode.endpoint
        return RpcStream(self, self._stub.Prefill(request), _prefill_event)


class GrpcDecodePort(_GrpcPort):
    """See DecodePort."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)

    def decode(self, job: DecodeJob) -> RpcStream[DecodedTokens]:
        """See DecodePort."""
        return RpcStream(self, self._stub.Decode(codec.encode_decode_job(job)), codec.decode_decoded_tokens)


def _paired(message: prefill_pb2.ConnectResponse) -> Paired:
    return Paired(verdict=codec.decode_verdict(message.verdict), canary=codec.decode_canary(message.canary))


def _prefill_event(message: prefill_pb2.PrefillResponse) -> PrefillEvent:
    kind = message.WhichOneof("event")
    if kind == "reserved":
        return Reserved(held_prefix_tokens=message.reserved.held_prefix_tokens)
    if kind == "committed":
        committed = message.committed
        return Committed(
            payload_bytes=committed.payload_bytes,
            exactness=EXACTNESSES.decode(committed.exactness, "committed.exactness"),
            handoff_s=committed.handoff_s,
            exposed_s=committed.exposed_s,
            max_abs_error=committed.max_abs_error if committed.HasField("max_abs_error") else None,
        )
    if kind == "first_token" and message.first_token.HasField("token_id"):
        return DecodedTokens(
            token_ids=(message.first_token.token_id,),
            finish_reason=codec.decode_finish_reason(message.first_token.finish_reason),
        )
    raise BadRequest(f"a prefill worker sent an event without content: {kind or 'unset'}", param=kind)
