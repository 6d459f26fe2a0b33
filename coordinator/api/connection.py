"""Answers that end when the client leaves: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.errors import ApiError
from kvpact.errors import KvpactError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499


class ClientLeft(Exception):
    """The client closed the connection before the answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it when the client leaves.

    Raises:
        ClientLeft: it left; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. Headers wait for the first, so that an early failure has its own status."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], failure: Callable[[KvpactError], ApiError]
    ) -> None:
        self._events = events
        self._failure = failure
        super().__init__(
            status_code=200, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientLeft):
            await while_connected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            started = False
            try:
                async for event in events:
                    if not started:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                        started = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except KvpactError as error:
                told = self._failure(error)
                if not started:
                    await told.response()(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": as_event(told.body()), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


def as_event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event that carries a JSON object."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
