"""The clients of the cluster tests notice what must not happen: errors, streams that are cut, lost tokens."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.cluster.traffic import Asked

DONE = b"data: [DONE]\n\n"


def event(*tokens: int, reason: str | None = None) -> bytes:
    choice = {"text": "", "token_ids": tokens, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@contextmanager
def server(status: int, body: bytes, *, promised: int | None = None) -> Iterator[str]:
    """One that gives this answer; `promised` is the length that it tells."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            if promised is not None:
                self.send_header("Content-Length", str(promised))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            return

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def test_a_whole_stream_is_taken() -> None:
    with server(200, event(4) + event(5, reason="length") + DONE) as url:
        assert Asked((1,), 2, streamed=True).of(url) == (4, 5)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, event(4)),
        (200, event(4) + event(5, reason="length")),
        (200, event(4) + event(5) + DONE),
        (200, event(4, reason="length") + DONE),
        (200, event(4) + b'data: {"error": {"message": "stopping"}}\n\n' + DONE),
        (503, b'{"error": {}}'),
    ],
    ids=["cut", "without its end", "without a reason", "a token lost", "an error event", "an error"],
)
def test_what_is_no_whole_stream_fails(status: int, body: bytes) -> None:
    with server(status, body) as url, pytest.raises(AssertionError):
        Asked((1,), 2, streamed=True).of(url)


def test_an_answer_that_is_cut_fails() -> None:
    body = json.dumps({"choices": [{"token_ids": [4, 5], "finish_reason": "length"}]}).encode()
    with server(200, body, promised=len(body)) as url:
        assert Asked((1,), 2, streamed=False).of(url) == (4, 5)
    with server(200, body[:20], promised=len(body)) as url, pytest.raises(http.client.IncompleteRead):
        Asked((1,), 2, streamed=False).of(url)
