"""The HTTP application: routes, and every error in one shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from coordinator.api.admin import add_admin_routes
from coordinator.api.bodies import read_body
from coordinator.api.connection import CLIENT_LEFT
from coordinator.api.context import ApiContext
from coordinator.api.errors import ApiError, from_http, from_validation
from coordinator.api.generation import chat, complete
from coordinator.api.middleware import BodyTooLarge, Gate, body_limit
from coordinator.api.requests import ChatBody, CompletionBody
from coordinator.api.status import add_status_routes
from kvpact.errors import BadRequest, KvpactError

COUNTED = ("/v1/completions", "/v1/chat/completions")
"""Routes whose errors are counted as requests."""


def create_app(context: ApiContext) -> ASGIApp:
    """An ASGI application over the parts of `context`."""
    app = FastAPI(title="kvpact", docs_url=None, redoc_url=None)
    _add_generation_routes(app, context)
    _add_model_routes(app, context)
    add_status_routes(app, context)
    add_admin_routes(app, context)
    _add_error_handlers(app, context)
    api = context.config.api
    return Gate(app, api.api_keys, api.admin_keys, body_limit(context.model.context))


def _add_generation_routes(app: FastAPI, context: ApiContext) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, context.context_tokens())
        return await complete(context, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, context.context_tokens())
        return await chat(context, body, request)


def _add_model_routes(app: FastAPI, context: ApiContext) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": context.model_name,
            "object": "model",
            "created": context.started_s,
            "owned_by": "kvpact",
            "root": context.model_name,
            "parent": None,
            "max_model_len": context.context_tokens(),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        context.check_model(name)
        return card()


def _add_error_handlers(app: FastAPI, context: ApiContext) -> None:
    def answer(request: Request, told: ApiError) -> Response:
        if request.url.path in COUNTED:
            context.metrics.request_failed(endpoint=request.url.path, code=told.code)
        return told.response()

    @app.exception_handler(KvpactError)
    async def kvpact_error(request: Request, error: KvpactError) -> Response:
        # Workers' errors are answered where the work is; what is left is about the body.
        return answer(request, context.told(error, request, about_body=isinstance(error, BadRequest)))

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        return answer(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return answer(request, from_http(error))

    @app.exception_handler(BodyTooLarge)
    async def too_large(request: Request, error: BodyTooLarge) -> Response:
        return answer(request, error.told)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def defect(request: Request, _: Exception) -> Response:
        return answer(
            request, ApiError(status=500, message="internal error; the log says more", code="internal")
        )
