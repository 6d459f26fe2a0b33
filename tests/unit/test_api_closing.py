"""Requests that run when the server stops: streams end with an error event, other answers are a 503."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from coordinator.api.closing import Closing

SCOPE: Scope = {"type": "http"}


async def ended(kind: str | None) -> list[Message]:
    """What a client gets whose request is cut; `kind` is the content type of an answer that has begun."""
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if kind is not None:
            headers = [(b"content-type", kind.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        if kind is None:
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    closing = Closing(app)
    request = asyncio.create_task(closing(SCOPE, never, send))
    await begun.wait()
    assert closing.running == 1
    closing.cut()
    await request
    assert closing.running == 0
    return sent


async def test_a_stream_ends_with_an_error_event_and_done() -> None:
    sent = await ended("text/event-stream; charset=utf-8")
    last: Any = sent[-1]
    assert last["more_body"] is False
    assert b'"the server is stopping"' in last["body"]
    assert last["body"].endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_has_not_begun_is_a_503() -> None:
    sent = await ended(None)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
    assert b"the server is stopping" in sent[1]["body"]
