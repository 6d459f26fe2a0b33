"""A server that answers every call of the protos with nothing and remembers it, and raw calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvpact.errors import KvpactError
from kvpact.handoff.security_transport import Link, Security
from kvpact.handoff.status import from_rpc_error
from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2

FILES = (coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2)
METHODS: dict[str, tuple[bool, bool]] = {
    f"/{service.full_name}/{method.name}": (method.client_streaming, method.server_streaming)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Full name of each call -> whether the request and whether the response is a stream."""
ECHO = "/kvpact.v1.WorkerService/Describe"
TICKS = "/kvpact.v1.PrefillService/Prefill"
"""A call whose answer goes on until the server's `go_on`."""


class AnyCall(grpc.GenericRpcHandler):
    """Handlers for all of METHODS."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See GenericRpcHandler."""
        method = handler_call_details.method
        if method not in METHODS:
            return None

        async def answer(request: Any, context: Any) -> bytes:
            self.reached.append(method)
            return b""

        async def answers(request: Any, context: Any) -> AsyncIterator[bytes]:
            self.reached.append(method)
            yield b"first"
            await self.go_on.wait()
            yield b"last"

        match METHODS[method]:
            case False, False:
                return grpc.unary_unary_rpc_method_handler(answer)
            case True, False:
                return grpc.stream_unary_rpc_method_handler(answer)
            case False, True:
                return grpc.unary_stream_rpc_method_handler(answers)
            case _:
                return grpc.stream_stream_rpc_method_handler(answers)


@asynccontextmanager
async def any_call_server(security: Security) -> AsyncIterator[tuple[AnyCall, str]]:
    """The handlers behind a server on loopback, and its host:port."""
    calls = AnyCall()
    server = security.make_server()
    server.add_generic_rpc_handlers((calls,))
    port = security.bind(server, "127.0.0.1:0")
    await server.start()
    yield calls, f"127.0.0.1:{port}"
    await server.stop(None)


async def call(channel: grpc.aio.Channel, method: str) -> None:
    """Makes one call of METHODS and takes its whole answer. Raises AioRpcError."""
    match METHODS[method]:
        case False, False:
            await channel.unary_unary(method)(b"", timeout=5)
        case True, False:
            await channel.stream_unary(method)(iter([b""]), timeout=5)
        case False, True:
            async for _ in channel.unary_stream(method)(b"", timeout=5):
                pass
        case _:
            async for _ in channel.stream_stream(method)(iter([b""]), timeout=5):
                pass


async def outcome(channel: grpc.aio.Channel, method: str) -> str:
    """Reason of the error with which a call ended, or `reached`."""
    try:
        await call(channel, method)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, peer="peer").reason
    return "reached"


async def failure(link: Link, method: str = ECHO) -> KvpactError:
    """The error with which a call on a link ends."""
    try:
        await call(link.channel, method)
    except grpc.aio.AioRpcError as error:
        return link.failure(error)
    raise AssertionError(f"{method} was answered")
