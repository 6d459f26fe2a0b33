"""DecodeService: a receiver and a decoder behind gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from kvpact.handoff import codec
from kvpact.handoff.jobs import DecodedTokens, DecodeJob, GenerateJob
from kvpact.handoff.messages import PushPart
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.status import answering
from kvpact.v1 import decode_pb2 as pb

SERVICE = "kvpact.v1.DecodeService"


class Decoder(Protocol):
    """Gives output tokens. All failures are KvpactErrors; closing an iterator cancels its sequence."""

    def decode(self, job: DecodeJob) -> AsyncGenerator[DecodedTokens, None]:
        """Takes the handoff and yields output tokens behind the first; the last item has a finish reason.

        Closing the iterator frees the blocks.
        """

    def generate(self, job: GenerateJob) -> AsyncGenerator[DecodedTokens, None]:
        """Computes a prompt itself and yields all output tokens; the last item has a finish reason."""


class DecodeService:
    """Servicer over the reader's side of handoffs and a decoder."""

    def __init__(self, reader: ReaderPort, decoder: Decoder) -> None:
        self._reader = reader
        self._decoder = decoder

    async def pair(
        self, request: pb.PairRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PairResponse:
        """Compares a writer's contract with the reader's."""
        async with answering(context):
            return codec.encode_answer(await self._reader.pair(codec.decode_offer(request)))

    async def reserve(
        self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReserveResponse:
        """Sets blocks aside for one handoff."""
        async with answering(context):
            terms, max_output_tokens = codec.decode_reserve(request)
            reservation = await self._reader.reserve(terms, max_output_tokens)
            return pb.ReserveResponse(reservation=codec.encode_reservation(reservation))

    async def push(
        self, parts: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PushResponse:
        """Takes the bytes."""
        async with answering(context):
            return codec.encode_receipt(await self._reader.push(_decoded(parts)))

    async def decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Streams output tokens of a committed handoff."""
        async with answering(context), aclosing(self._tokens(request)) as tokens:
            async for item in tokens:
                yield codec.encode_decoded_tokens(item)

    async def generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams output tokens of a prompt that this worker computes itself."""
        async with answering(context), aclosing(self._generated(request)) as tokens:
            async for item in tokens:
                yield codec.encode_generated_tokens(item)

    def _generated(self, request: pb.GenerateRequest) -> AsyncGenerator[DecodedTokens, None]:
        return self._decoder.generate(codec.decode_generate_job(request))

    def _tokens(self, request: pb.DecodeRequest) -> AsyncGenerator[DecodedTokens, None]:
        return self._decoder.decode(codec.decode_decode_job(request))


async def _decoded(parts: AsyncIterator[bytes]) -> AsyncIterator[PushPart]:
    async for data in parts:
        yield codec.push_from_bytes(data)


def add_decode_service(server: grpc.aio.Server, reader: ReaderPort, decoder: Decoder) -> None:
    """Adds the service, before the server starts. Push parts come as bytes: payloads aren't copied."""
    service = DecodeService(reader, decoder)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Pair": grpc.unary_unary_rpc_method_handler(
            service.pair, pb.PairRequest.FromString, pb.PairResponse.SerializeToString
        ),
        "Reserve": grpc.unary_unary_rpc_method_handler(
            service.reserve, pb.ReserveRequest.FromString, pb.ReserveResponse.SerializeToString
        ),
        "Push": grpc.stream_unary_rpc_method_handler(service.push, None, pb.PushResponse.SerializeToString),
        "Decode": grpc.unary_stream_rpc_method_handler(
            service.decode, pb.DecodeRequest.FromString, pb.DecodeResponse.SerializeToString
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
