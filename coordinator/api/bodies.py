"""From the bytes of a request to a checked body; large ones are read off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from coordinator.api.lengths import check_lengths
from kvpact.errors import BadRequest

Body = TypeVar("Body", bound=BaseModel)

INLINE_BYTES = 65_536
"""Longer bodies are parsed and checked off the event loop."""
INVALID_JSON = "invalid_json"
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, form: type[Body], context_tokens: int) -> Body:
    """The body of a request as a `form`; `context_tokens` are what the workers serve.

    Raises:
        BadRequest: it is no JSON, holds what is no Unicode, or a list that can't fit the context.
        RequestValidationError: its fields have the wrong form.
    """
    if not _is_json(request.headers.get("content-type", "")):
        raise BadRequest("the body must be a JSON object sent as application/json", code=INVALID_JSON)
    raw = await request.body()
    if len(raw) <= INLINE_BYTES:
        return parse_body(raw, form, context_tokens)
    return await asyncio.to_thread(parse_body, raw, form, context_tokens)


def parse_body(raw: bytes, form: type[Body], context_tokens: int) -> Body:
    """See read_body."""
    try:
        text = raw.decode(json.detect_encoding(raw))
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise BadRequest(f"the body is not valid JSON: {why}", code=INVALID_JSON) from error
    if isinstance(fields, dict):
        check_lengths(fields, context_tokens)
        if _MAYBE_SURROGATE.search(text):
            _check_unicode(fields)
    try:
        return form.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _check_unicode(fields: Mapping[str, Any]) -> None:
    """Raises BadRequest that names a field with half of a surrogate pair, which no text can hold."""
    pending: list[tuple[str, str, Any]] = [("", "", fields)]
    while pending:
        param, place, found = pending.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(found, str):
            _check_text(found, param, place)
        elif isinstance(found, dict):
            for key in found:
                _check_text(key, param or ascii(key), f"a name in {place or 'the body'}")
            inner = list(found.items())
        elif isinstance(found, list):
            inner = [(str(index), entry) for index, entry in enumerate(found)]
        pending += [(param or key, f"{place}.{key}" if place else key, entry) for key, entry in inner]


def _check_text(text: str, param: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{place} isn't valid Unicode: it holds half of a surrogate pair at character {error.start}",
            param=param,
        ) from error
