"""The end of running requests when the server won't wait for them: each client is told, none is cut off."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.connection import DONE, as_event
from coordinator.api.errors import ApiError

STOPPING = ApiError(
    status=503, message="the server is stopping", code="unavailable", headers={"Retry-After": "1"}
)


class Closing:
    """ASGI middleware that counts running requests and can end them all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._cut = asyncio.Event()
        self.running = 0

    def cut(self) -> None:
        """Ends every running request: a stream with an error event and [DONE], any other with a 503."""
        self._cut.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self.running += 1
        try:
            await self._run(scope, receive, send)
        finally:
            self.running -= 1

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send, self._cut)

        async def receive_or_cut() -> Message:
            return await _first(receive, self._cut)

        await self._app(scope, receive_or_cut, answer.send)
        if self._cut.is_set():
            await answer.end(scope, receive)


class _Answer:
    """What of one answer has gone out."""

    def __init__(self, send: Send, cut: asyncio.Event) -> None:
        self._send = send
        self._cut = cut
        self._started = False
        self._events = False
        self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._cut.is_set():
                return
            self._started = True
            self._events = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event")
        if self._started:
            self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)

    async def end(self, scope: Scope, receive: Receive) -> None:
        """Says to a client whose answer isn't complete that the server is stopping."""
        if not self._started:
            await STOPPING.response()(scope, receive, self._send)
        elif self._events and not self._ended:
            last = as_event(STOPPING.body()) + DONE
            await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _first(receive: Receive, cut: asyncio.Event) -> Message:
    """The client's next message; once `cut` is set, that it has left."""
    if cut.is_set():
        return {"type": "http.disconnect"}
    message, stop = asyncio.ensure_future(receive()), asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({message, stop}, return_when=asyncio.FIRST_COMPLETED)
        return message.result() if message.done() else {"type": "http.disconnect"}
    finally:
        for task in (message, stop):
            task.cancel()
        await asyncio.gather(message, stop, return_exceptions=True)
