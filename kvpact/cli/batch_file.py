"""An OpenAI batch file: its lines, and the records that answer them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpact.errors import BadRequest, UnreadableSource

ROUTES = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 16 << 20
INVALID_LINE = "invalid_line"
UNREACHABLE = "unreachable"
AGAIN = frozenset({429, 500, 502, 503, 504})
"""Answers after which another try may work."""
OF_THE_KEY = frozenset({401, 403})
"""Answers to the run's key, not to the line: they stay so until it is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One line to send."""

    line: int
    """Counted from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One line that can't be sent."""

    line: int
    custom_id: str | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server said to one line."""

    status: int
    request_id: str
    body: Any


def read_jobs(path: Path) -> Iterator[Job | Broken]:
    """Every line of a batch file that isn't blank, in order; a bad one is told and doesn't stop the rest.

    Raises:
        UnreadableSource: the file can't be read.
    """
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, data in enumerate(_bounded_lines(lines), start=1):
                if data is not None and not data.strip():
                    continue
                job = _job(number, data)
                if isinstance(job, Job) and job.custom_id in seen:
                    problem = f"custom_id {job.custom_id!r} is that of line {seen[job.custom_id]}"
                    job = Broken(line=number, custom_id=job.custom_id, problem=problem)
                elif isinstance(job, Job):
                    seen[job.custom_id] = number
                yield job
    except OSError as error:
        raise UnreadableSource(f"can't read batch file {path}: {error.strerror}", source=str(path)) from error


def answered(job: Job, answer: Answer) -> dict[str, Any]:
    """The record of a line that the server answered, by an error too."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    return _record(job.line, job.custom_id, response, None)


def unsent(line: int, custom_id: str | None, *, code: str, message: str) -> dict[str, Any]:
    """The record of a line to which there is no answer."""
    return _record(line, custom_id, None, {"code": code, "message": message})


def failed(record: dict[str, Any]) -> bool:
    """Whether a record says that its line came to nothing."""
    response = record["response"]
    return response is None or response["status_code"] != 200


def finished(record: dict[str, Any]) -> bool:
    """Whether a later run would end the same way; else servers or the run's key were at fault."""
    response, error = record["response"], record["error"]
    if response is None:
        return error is not None and error["code"] != UNREACHABLE
    return response["status_code"] not in AGAIN | OF_THE_KEY


def parse_record(data: bytes) -> dict[str, Any] | None:
    """The record in a line of an output file; None where it is something else."""
    record = _parse(data)
    fields = {"line", "custom_id", "response", "error"}
    return record if isinstance(record, dict) and fields <= record.keys() else None


def check_same(job: Job | Broken, recorded: str | None, output: Path, *, may_be_mended: bool = False) -> None:
    """Refuses to go on with the output of another batch file; `may_be_mended`: the recorded line failed.

    Raises:
        BadRequest: the custom_id that is recorded isn't that of the line.
    """
    if recorded != job.custom_id:
        mended = "; or, if that line was corrected, add --retry-failed" if may_be_mended else ""
        raise BadRequest(
            f"{output} holds custom_id {recorded!r} for line {job.line}, the batch file has "
            f"{job.custom_id!r} there; it belongs to another batch, so name another output file{mended}",
            param="output",
        )


def _record(line: int, custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
        "line": line,
    }


def _bounded_lines(lines: Any) -> Iterator[bytes | None]:
    """Lines; None for one that is longer than MAX_LINE_BYTES, whose rest is skipped."""
    while data := lines.readline(MAX_LINE_BYTES + 1):
        if len(data) <= MAX_LINE_BYTES or data.endswith(b"\n"):
            yield data
            continue
        while data and not data.endswith(b"\n"):
            data = lines.readline(MAX_LINE_BYTES)
        yield None


def _job(number: int, data: bytes | None) -> Job | Broken:
    if data is None:
        return Broken(line=number, custom_id=None, problem=f"the line is longer than {MAX_LINE_BYTES} bytes")
    request = _parse(data)
    if not isinstance(request, dict):
        return Broken(line=number, custom_id=None, problem="the line is no JSON object")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str):
        return Broken(line=number, custom_id=None, problem="custom_id is absent or no string")
    problem = _problem(request)
    if problem is not None:
        return Broken(line=number, custom_id=custom_id, problem=problem)
    return Job(line=number, custom_id=custom_id, url=request["url"], body=request["body"])


def _problem(request: dict[str, Any]) -> str | None:
    """What keeps a request from being sent, if anything does."""
    if request.get("method") != "POST":
        return f"method is {request.get('method')!r}; expected 'POST'"
    if request.get("url") not in ROUTES:
        return f"url is {request.get('url')!r}; expected {' or '.join(ROUTES)}"
    body = request.get("body")
    if not isinstance(body, dict):
        return "body is absent or no JSON object"
    if body.get("stream"):
        return "body.stream is set; a batch takes whole answers"
    return None


def _parse(data: bytes) -> Any:
    """The JSON value of a line; None where it isn't JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
