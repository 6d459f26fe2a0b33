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
USERS = "/v1"
OPERATORS = "/admin"
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
    """ASGI middleware. Sets scope["state"]: request_id, has_key, is_admin (None where no admin keys are set).

    Without admin keys a user's key opens what operators see as well.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str], body_limit: int
    ) -> None:
        self._app = app
        self._body_limit = body_limit
        self._user_digests = _digests(api_keys)
        self._admin_digests = _digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_nonce().hex()
        given_key = _bearer_digest(headers.get("authorization", ""))
        is_admin = _is_known(given_key, self._admin_digests) if self._admin_digests else None
        has_key = bool(is_admin) or _is_known(given_key, self._user_digests)
        scope.setdefault("state", {}).update(request_id=request_id, has_key=has_key, is_admin=is_admin)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        refusal = self._refusal(scope["path"], headers, has_key=has_key, is_admin=is_admin)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        await self._app(scope, _bounded(receive, self._body_limit), send_with_id)

    def _refusal(
        self, path: str, headers: Headers, *, has_key: bool, is_admin: bool | None
    ) -> ApiError | None:
        if is_admin is False and _is_below(path, OPERATORS):
            return _key_wanted("a valid admin key", "invalid_admin_key")
        guarded = _is_below(path, USERS) or (is_admin is None and _is_below(path, OPERATORS))
        if self._user_digests and guarded and not has_key:
            return _key_wanted("a valid API key", "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._body_limit:
            return too_large(self._body_limit)
        return None


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _bearer_digest(authorization: str) -> bytes | None:
    scheme, _, key = authorization.partition(" ")
    return hashlib.sha256(key.strip().encode()).digest() if scheme.lower() == "bearer" else None


def _is_known(digest: bytes | None, known: Sequence[bytes]) -> bool:
    """Compares with every known one, so that the time tells nothing."""
    matches = [digest is not None and hmac.compare_digest(digest, each) for each in known]
    return any(matches)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _key_wanted(what: str, code: str) -> ApiError:
    return ApiError(
        status=401,
        message=f"{what} is needed: send it as `Authorization: Bearer KEY`",
        code=code,
        headers={"WWW-Authenticate": "Bearer"},
    )


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
