"""Answers bytes that are no message of the method's kind as the caller's fault."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvpact.errors import BadRequest
from kvpact.handoff.status import abort

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that can't be read."""

    problem: str


class MalformedRefusal(grpc.aio.ServerInterceptor):
    """For every server: without it such a request is UNKNOWN and leaves a traceback in the log."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        codec = (_tolerant(handler.request_deserializer), handler.response_serializer)
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(_answers(handler.unary_unary), *codec)
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_streams(handler.unary_stream), *codec)
        return handler  # type: ignore[no-any-return]


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialize(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return deserialize


def _answers(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            await abort(context, _refusal(request))
        return await behaviour(request, context)

    return answer


def _streams(behaviour: Callable[[Any, Context], Any]) -> Any:
    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, _Malformed):
            await abort(context, _refusal(request))
        async with contextlib.aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                yield message

    return stream


def _refusal(request: _Malformed) -> BadRequest:
    return BadRequest(f"the request can't be read: {request.problem}")
