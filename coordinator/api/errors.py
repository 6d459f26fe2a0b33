"""Every error in OpenAI's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvpact.errors import (
    ERROR_CODES,
    BadRequest,
    ContractRefused,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    NoCompatiblePair,
    NotPermitted,
    SelfCheckFailed,
    Unavailable,
    UnknownHandoff,
    UnreadableSource,
)
from kvpact.types import Difference, Verdict

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
RETRY_AFTER_S = 1
MODEL_NOT_FOUND = "model_not_found"
_AGAIN = "try again"
TO_STRANGERS: dict[type[KvpactError], str] = {
    KvpactError: "a worker failed",
    BadRequest: "the workers can't serve this request as it stands",
    UnreadableSource: "a worker can't read its model",
    ContractRefused: "two workers can't share a cache",
    NoCompatiblePair: "no two workers can share a cache",
    UnknownHandoff: f"a worker lost this request; {_AGAIN}",
    Fenced: f"a worker was replaced while it served this request; {_AGAIN}",
    Exhausted: "the workers have no room now; try again later",
    DataLoss: f"a check of the data between two workers failed; {_AGAIN}",
    Unavailable: "no workers can serve this request now; try again later",
    NotPermitted: "the workers don't take this server's certificate",
    SelfCheckFailed: "a worker failed its check of itself",
}
"""What clients that may see no worker names are told instead of an error's own text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """What an HTTP client is told."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        known = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": known | dict(self.extra)}

    def response(self) -> Response:
        """The HTTP response."""
        return Response(
            json.dumps(self.body()), self.status, headers=dict(self.headers), media_type="application/json"
        )


def from_kvpact(error: KvpactError, *, with_values: bool, about_body: bool = False) -> ApiError:
    """What is told of an error.

    `with_values`: the client may see both sides' values and worker names. `about_body`: a BadRequest is about
    the body alone, so that its text is for everyone.
    """
    status = ERROR_CODES[type(error)].http
    if isinstance(error, (NoCompatiblePair, ContractRefused)):
        return _no_pair(error.verdict, status, with_values=with_values)
    message = str(error) if with_values else TO_STRANGERS[type(error)]
    if isinstance(error, BadRequest):
        return ApiError(
            status=404 if error.code == MODEL_NOT_FOUND else status,
            message=str(error) if about_body else message,
            code=error.code or "invalid_value",
            param=error.param,
        )
    headers = {}
    if isinstance(error, Exhausted):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return ApiError(status=status, message=message, code=error.reason.lower(), headers=headers)


def from_http(error: HTTPException) -> ApiError:
    """An error of routing, such as an unknown path or a wrong method."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        status=error.status_code,
        message=str(error.detail),
        code=codes.get(error.status_code, "http_error"),
        headers=error.headers or {},
    )


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first problem of a body that has the wrong form; `problems` as pydantic lists them."""
    problem = problems[0]
    where = [str(part) for part in problem["loc"]]
    if not where:
        return ApiError(
            status=400, message="the body must be a JSON object sent as application/json", code="invalid_json"
        )
    param = where[0]
    if problem["type"] == "missing":
        return ApiError(
            status=400, message=f"{'.'.join(where)} is missing", code="missing_field", param=param
        )
    why = problem["msg"].removeprefix("Value error, ")
    found = _short(problem.get("input"))
    return ApiError(
        status=400, message=f"{'.'.join(where)}: found {found}; {why}", code="invalid_value", param=param
    )


def _no_pair(verdict: Verdict | None, status: int, *, with_values: bool) -> ApiError:
    differences = (
        [_difference(each, with_values=with_values) for each in verdict.differences] if verdict else []
    )
    refusing = {each["field"]: each["remedy"] for each in differences if each["action"] == "reject"}
    remedy = next((f"; {remedy}" for remedy in refusing.values() if remedy), "")
    return ApiError(
        status=status,
        message="no prefill worker and decode worker can share a cache: they differ in "
        f"{', '.join(refusing) or 'fields that are not known'}{remedy}",
        code="no_compatible_pair",
        headers={"x-should-retry": "false"},
        extra={"differences": differences},
    )


def _difference(difference: Difference, *, with_values: bool) -> dict[str, Any]:
    told = {
        "field": difference.field,
        "layers": list(difference.layers),
        "relation": difference.relation.value,
        "action": difference.action.value,
        "remedy": difference.remedy,
    }
    if with_values:
        told |= {
            "writer": difference.writer,
            "reader": difference.reader,
            "explanation": difference.explanation,
        }
    return told


def _short(value: Any) -> str:
    """A value as JSON, cut. Looks no further than what is shown."""
    text = ""
    for piece in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(value):
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text
