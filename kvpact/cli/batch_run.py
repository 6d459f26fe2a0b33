"""Sends the lines of a batch to an OpenAI server, many at a time, and tells each outcome once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import httpx

from kvpact.cli.batch_file import (
    AGAIN,
    INVALID_LINE,
    OF_THE_KEY,
    UNREACHABLE,
    Answer,
    Broken,
    Job,
    answered,
    unsent,
)
from kvpact.errors import BadRequest, Unavailable

TRIES = 6
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
PROBE_S = 30.0
Send = Callable[[Job], Awaitable[Answer]]
Sleep = Callable[[float], Awaitable[None]]


async def run_lines(
    lines: Iterable[Job | Broken], send: Send, *, at_once: int
) -> AsyncGenerator[dict[str, Any], None]:
    """The record of every line, in order of completion; at most `at_once` lines are under way."""
    waiting = iter(lines)
    running: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        while True:
            while len(running) < at_once and (line := next(waiting, None)) is not None:
                running.add(asyncio.create_task(_outcome(line, send)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def check_alive(http: httpx.AsyncClient) -> None:
    """Whatever a server answers to GET /health, it is there. Raises Unavailable where none answers."""
    try:
        await http.get("/health", timeout=PROBE_S)
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(
            f"no server answers at {str(http.base_url).rstrip('/')}: {why}; see --url"
        ) from error


def check_key(record: dict[str, Any]) -> None:
    """Looks at the first record with an answer. Raises BadRequest where the server refuses the run's key."""
    response = record["response"]
    if response["status_code"] not in OF_THE_KEY:
        return
    body = response["body"]
    told = body.get("error") if isinstance(body, dict) else None
    message = told.get("message", "") if isinstance(told, dict) else str(body)
    raise BadRequest(
        f"the server answered {response['status_code']}: {message}; see --api-key-file",
        param="--api-key-file",
    )


class Client:
    """Sends one line at a time to `url`, again where the server is full, restarting or out of reach."""

    def __init__(self, http: httpx.AsyncClient, *, sleep: Sleep = asyncio.sleep) -> None:
        self._http = http
        self._sleep = sleep

    async def send(self, job: Job) -> Answer:
        """The server's answer, the last one where it stays an error.

        Raises:
            httpx.TransportError: the server couldn't be reached in all the tries.
        """
        pause_s = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                response = await self._http.post(job.url, json=job.body)
            except httpx.TransportError:
                if not left:
                    raise
                asked_s = 0.0
            else:
                if not left or not _worth_again(response):
                    return _answer(response)
                asked_s = _asked_pause_s(response)
            await self._sleep(min(max(pause_s, asked_s), LONGEST_PAUSE_S))
            pause_s *= 2
        raise AssertionError("the last try returns or raises")


def _worth_again(response: httpx.Response) -> bool:
    """Whether another try may work and the server doesn't say that it won't."""
    return response.status_code in AGAIN and response.headers.get("x-should-retry") != "false"


def _asked_pause_s(response: httpx.Response) -> float:
    """Seconds that Retry-After asks for; 0 where it says nothing that is a number."""
    given = response.headers.get("retry-after", "")
    return float(given) if given.replace(".", "", 1).isdecimal() else 0.0


def _answer(response: httpx.Response) -> Answer:
    try:
        body = response.json()
    except ValueError:
        body = {"error": {"message": response.text[:1000]}}
    request_id = response.headers.get("x-request-id", "")
    return Answer(status=response.status_code, request_id=request_id, body=body)


async def _outcome(line: Job | Broken, send: Send) -> dict[str, Any]:
    if isinstance(line, Broken):
        return unsent(line.line, line.custom_id, code=INVALID_LINE, message=line.problem)
    try:
        return answered(line, await send(line))
    except httpx.HTTPError as error:
        message = f"the server gave no answer: {type(error).__name__} {error}".strip()
        return unsent(line.line, line.custom_id, code=UNREACHABLE, message=message)
