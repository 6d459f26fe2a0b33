"""The gRPC transport: a ReaderPort over DecodeService and WorkerService of another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from kvpact.errors import BadRequest, ContractRefused, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.messages import (
    CommitReceipt,
    HandoffState,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    PushPart,
    Reservation,
    WorkerDescription,
)
from kvpact.handoff.security_transport import PLAINTEXT, Security
from kvpact.tls import PeerRole
from kvpact.types import ContractDigest, HandoffId, Verdict, WorkerLife
from kvpact.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc

T = TypeVar("T")
M = TypeVar("M")
CALL_DEADLINE_S = 10.0
CALL_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""What writing to a call that is over raises."""
PUSH_METHOD = "/kvpact.v1.DecodeService/Push"


class GrpcReaderPort:
    """A reader at `endpoint` (host:port). `life` is the process life that the owner means to talk to."""

    def __init__(
        self,
        endpoint: str,
        life: WorkerLife,
        *,
        deadline_s: float = CALL_DEADLINE_S,
        security: Security = PLAINTEXT,
        server: PeerRole = PeerRole.DECODE,
    ) -> None:
        self.endpoint = endpoint
        self.life = life
        self._deadline_s = deadline_s
        self._link = security.link(endpoint, server)
        self._channel = self._link.channel
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._worker = handoff_pb2_grpc.WorkerServiceStub(self._channel)
        self._push = self._channel.stream_unary(
            PUSH_METHOD,
            request_serializer=codec.push_to_bytes,
            response_deserializer=decode_pb2.PushResponse.FromString,
        )

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        request = codec.encode_offer(offer)
        answer = await self._answer(lambda: self._decode.Pair(request, timeout=self._deadline_s))
        return self._read(codec.decode_answer, answer)

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort. A refusal comes with the whole verdict where the reader still gives it."""
        request = codec.encode_reserve(terms, max_output_tokens)
        try:
            response = await self._answer(lambda: self._decode.Reserve(request, timeout=self._deadline_s))
        except ContractRefused as error:
            raise ContractRefused(str(error), verdict=await self._whole(error.verdict)) from error
        return self._read(codec.decode_reservation, response.reservation)

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort. An error of `parts` cancels the call and comes out as it is."""
        call = await self._answer(self._started_push)
        feeding = asyncio.ensure_future(_feed(call, parts))
        answering = asyncio.ensure_future(self._answer(lambda: call))
        try:
            await asyncio.wait([feeding, answering], return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and not answering.done():
                feeding.result()
            return self._read(codec.decode_receipt, await answering)
        finally:
            feeding.cancel()
            call.cancel()
            await asyncio.gather(feeding, answering, return_exceptions=True)

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See ReaderPort."""
        request = handoff_pb2.RenewRequest(handoff_id=handoff_id, worker=codec.encode_life(life))
        response = await self._answer(lambda: self._worker.Renew(request, timeout=self._deadline_s))
        return self._read(lambda lease: codec.decode_seconds(lease, "lease"), response.lease)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See ReaderPort."""
        request = handoff_pb2.ReleaseRequest(
            handoff_id=handoff_id, reason=reason, writer_stopped=writer_stopped
        )
        response = await self._answer(lambda: self._worker.Release(request, timeout=self._deadline_s))
        return self._read(codec.decode_state, response.previous_state)

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """A whole verdict that the reader gave at pairing."""
        request = handoff_pb2.GetVerdictRequest(writer_digest=writer_digest, reader_digest=reader_digest)
        response = await self._answer(lambda: self._worker.GetVerdict(request, timeout=self._deadline_s))
        return self._read(codec.decode_verdict, response.verdict)

    async def describe(self) -> WorkerDescription:
        """Contract, counters and load of the reader."""
        request = handoff_pb2.DescribeRequest()
        answer = await self._answer(lambda: self._worker.Describe(request, timeout=self._deadline_s))
        return self._read(codec.decode_description, answer)

    async def close(self) -> None:
        """Closes the channel. Idempotent."""
        await self._channel.close()

    async def _started_push(self) -> grpc.aio.StreamUnaryCall[PushPart, decode_pb2.PushResponse]:
        return self._push()

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Begins a call and awaits it; all its failures come out as KvpactErrors."""
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            raise self._link.failure(error) from error
        except grpc.aio.UsageError as error:
            raise Unavailable(f"the channel to {self.endpoint} was closed") from error

    def _read(self, decode: Callable[[M], T], message: M) -> T:
        """Decodes an answer. One that can't be read is the reader's fault, not that of whoever asked."""
        try:
            return decode(message)
        except BadRequest as error:
            raise KvpactError(f"{self.endpoint} sent an answer that can't be read: {error}") from error

    async def _whole(self, short: Verdict) -> Verdict:
        """The verdict that `short` was cut from; `short` itself where the reader gives none that refuses."""
        try:
            whole = await self.verdict(short.writer_digest, short.reader_digest)
        except KvpactError:
            return short
        return whole if whole.word is short.word else short


async def _feed(
    call: grpc.aio.StreamUnaryCall[PushPart, decode_pb2.PushResponse], parts: AsyncIterator[PushPart]
) -> None:
    """Writes all parts. A call that ended stops it quietly: the call's own answer tells why."""
    await call.wait_for_connection()
    async for part in parts:
        try:
            await write(call, codec.push_to_bytes(part))
        except CALL_ENDED:
            return
    with suppress(*CALL_ENDED):
        await call.done_writing()


async def write(call: Any, message: bytes) -> None:
    """Writes one message. `call.write` would put an INTERNAL of its own over a refusal that is on its way."""
    if call.done():
        raise asyncio.InvalidStateError("the call is over")
    await call._cython_call.send_serialized_message(message)
