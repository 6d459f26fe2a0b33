"""A gRPC server between a writer and a reader that acts on the messages themselves, by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from kvpact.errors import KvpactError
from kvpact.handoff.grpc_transport import CALL_ENDED, PUSH_METHOD, write
from kvpact.handoff.status import abort
from kvpact.v1 import decode_pb2 as pb
from tests.handoff_faults import Script, Step, flipped

STEPS = {"Pair": Step.PAIR, "Reserve": Step.RESERVE}


class Proxy(grpc.GenericRpcHandler):
    """Forwards calls of one answer and pushes as bytes. `endpoint` is the reader behind it now."""

    def __init__(self, script: Script, endpoint: str) -> None:
        self._script = script
        self._channels: list[grpc.aio.Channel] = []
        self.forward_to(endpoint)

    def forward_to(self, endpoint: str) -> None:
        """Another reader from now on, at the same address as the writer sees it."""
        self._channel = grpc.aio.insecure_channel(endpoint)
        self._channels.append(self._channel)

    async def replay(self, messages: Iterable[bytes]) -> grpc.StatusCode:
        """Sends a push to the reader of now as it was sent before, past the script; how it was answered."""
        call = self._channel.stream_unary(PUSH_METHOD)()
        await _feed(call, _stream(messages))
        return await call.code()

    async def close(self) -> None:
        """Closes every channel."""
        for channel in self._channels:
            await channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """See GenericRpcHandler."""
        if details.method == PUSH_METHOD:
            return grpc.stream_unary_rpc_method_handler(self._push)
        return grpc.unary_unary_rpc_method_handler(self._caller(details.method))

    def _caller(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        step = STEPS.get(method.rsplit("/", 1)[1])

        async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            async def send(message: bytes) -> bytes:
                return await self._channel.unary_unary(method)(message)

            return await _answered(context, self._script.call(step, send, request, _corrupt_request(step)))

        return call

    async def _push(self, parts: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        script = self._script
        call = self._channel.stream_unary(PUSH_METHOD)()
        feeding = asyncio.ensure_future(_feed(call, script.parts(parts, corrupt_push)))

        async def pushed() -> bytes:
            return script.answered(await script.race(asyncio.ensure_future(_awaited(call))))

        try:
            return await _answered(context, pushed())
        finally:
            feeding.cancel()
            call.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


@asynccontextmanager
async def proxied(script: Script, endpoint: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy that serves, with its own endpoint."""
    server, proxy = grpc.aio.server(), Proxy(script, endpoint)
    server.add_generic_rpc_handlers((proxy,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await proxy.close()


async def _answered(context: grpc.aio.ServicerContext[Any, Any], answer: Awaitable[bytes]) -> bytes:
    """The reader's answer; its errors go on to the writer as they are."""
    try:
        return await answer
    except grpc.aio.AioRpcError as error:
        await context.abort(
            error.code(), error.details() or "", trailing_metadata=tuple(error.trailing_metadata() or ())
        )
    except KvpactError as error:
        await abort(context, error)
    raise AssertionError("abort always raises")


async def _feed(call: Any, parts: AsyncIterator[bytes]) -> None:
    await call.wait_for_connection()
    async for part in parts:
        try:
            await write(call, part)
        except CALL_ENDED:
            return
    with suppress(*CALL_ENDED):
        await call.done_writing()


async def _stream(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _awaited(call: Awaitable[bytes]) -> bytes:
    return await call


def _corrupt_request(step: Step | None) -> Callable[[bytes], bytes]:
    def corrupt(data: bytes) -> bytes:
        if step is Step.PAIR:
            offer = pb.PairRequest.FromString(data)
            offer.contract = flipped(offer.contract, len(offer.contract) // 2)
            return offer.SerializeToString()
        request = pb.ReserveRequest.FromString(data)
        request.terms.token_ids[0] ^= 1
        return request.SerializeToString()

    return corrupt


def corrupt_push(data: bytes) -> bytes:
    """As corrupt_part, on the serialised message; a chunk's payload is its end."""
    message = pb.PushRequest.FromString(data)
    match message.WhichOneof("part"):
        case "open":
            message.open.contract_digest = flipped(message.open.contract_digest)
        case "commit":
            message.commit.payload_bytes ^= 1
        case _:
            return flipped(data)
    return message.SerializeToString()
