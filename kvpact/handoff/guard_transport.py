"""Asks, before any handler runs, whether the caller's certificate entitles it to the call."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvpact.errors import NotPermitted
from kvpact.handoff.permissions import check_caller
from kvpact.handoff.status import abort

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


def peer_names(context: Context) -> tuple[str, ...]:
    """DNS names in the caller's certificate; none where it showed none, and in plaintext."""
    return tuple(name.decode("utf-8", "replace") for name in context.auth_context().get("peer_dns", ()))


class RoleGuard(grpc.aio.ServerInterceptor):
    """For servers that ask for certificates; what it can't tell the caller of is refused."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        codec = (handler.request_deserializer, handler.response_serializer)
        match bool(handler.request_streaming), bool(handler.response_streaming):
            case False, False:
                return grpc.unary_unary_rpc_method_handler(_answers(method, handler.unary_unary), *codec)
            case True, False:
                return grpc.stream_unary_rpc_method_handler(_answers(method, handler.stream_unary), *codec)
            case False, True:
                return grpc.unary_stream_rpc_method_handler(_streams(method, handler.unary_stream), *codec)
            case _:
                return grpc.stream_stream_rpc_method_handler(_streams(method, handler.stream_stream), *codec)


def _answers(method: str, behaviour: Behaviour) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        await _check(method, context)
        return await behaviour(request, context)

    return guarded


def _streams(method: str, behaviour: Behaviour) -> Any:
    async def guarded(request: Any, context: Context) -> None:
        await _check(method, context)
        if inspect.iscoroutinefunction(behaviour):
            await behaviour(request, context)
            return
        messages: AsyncIterator[Any] = behaviour(request, context)
        async with contextlib.aclosing(messages):  # type: ignore[type-var]
            async for message in messages:
                await context.write(message)

    return guarded


async def _check(method: str, context: Context) -> None:
    try:
        check_caller(method, peer_names(context))
    except NotPermitted as error:
        logger.warning("refused a call from %s: %s", context.peer(), error)
        await abort(context, error)
