"""What holds for every request: an id, the key where one is needed, a bound on the body."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.errors import ApiError
from coordinator.api.lengths import MAX_PROMPTS
from kvpact.clock import new_nonce

MAX_BODY_BYTES = 16 << 20
BYTES_BESIDE_PROMPTS = 1 << 20
BYTES_PER_TOKEN = 16
"""JSON bytes of a token of text, escapes included, with plenty to spare."""
GUARDED = ("/v1", "/admin")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class BodyTooLarge(Exception):
    """The body grew beyond its limit while it was read."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.told = too_large(limit)


def body_limit(context_tokens: int) -> int:
    """Bytes of the largest body: what as many prompts as possible can need, each as long as the context."""
    return min(MAX_BODY_BYTES, BYTES_BESIDE_PROMPTS + MAX_PROMPTS * context_tokens * BYTES_PER_TOKEN)


def too_large(limit: int) -> ApiError:
    """What the sender of a body with more than `limit` bytes is told."""
    return ApiError(status=413, message=f"the body is larger than {limit} bytes", code="request_too_large")


class Gate:
    """ASGI middleware. Sets scope["state"]["request_id"] and ["has_key"]."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], body_limit: int) -> None:
        self._app = app
        self._body_limit = body_limit
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_nonce().hex()
        has_key = self._has_key(headers.get("authorization", ""))
        scope.setdefault("state", {}).update(request_id=request_id, has_key=has_key)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        refusal = self._refusal(scope["path"], headers, has_key=has_key)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        await self._app(scope, _bounded(receive, self._body_limit), send_with_id)

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    def _refusal(self, path: str, headers: Headers, *, has_key: bool) -> ApiError | None:
        guarded = any(path == root or path.startswith(root + "/") for root in GUARDED)
        if self._digests and guarded and not has_key:
            return ApiError(
                status=401,
                message="a valid API key is needed: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._body_limit:
            return too_large(self._body_limit)
        return None


def _bounded(receive: Receive, limit: int) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > limit:
                raise BodyTooLarge(limit)
        return message

    return bounded
