"""The two generation routes: jobs in, one answer or a stream out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.connection import CLIENT_LEFT, ClientLeft, EventStream, as_event, while_connected
from coordinator.api.context import ApiContext
from coordinator.api.errors import ApiError
from coordinator.api.prompts import Job, chat_job, completion_jobs
from coordinator.api.requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    refuse_unsupported,
    unknown_fields,
)
from coordinator.api.shapes import ChatShape, Choice, CompletionShape, Head, Shape, usage_of
from coordinator.text_generation import TextPart, generate_text
from kvpact.clock import wall_time_s
from kvpact.errors import KvpactError

logger = logging.getLogger(__name__)

Parts = AsyncGenerator[tuple[int, TextPart], None]


async def complete(context: ApiContext, body: CompletionBody, request: Request) -> Response:
    """POST /v1/completions. Raises KvpactError before anything is sent."""
    _check(context, body)
    request_id: str = request.state.request_id
    jobs = await completion_jobs(
        body, context.model, context.config.api, request_id, context_tokens=context.context_tokens()
    )
    head = Head(id=f"cmpl-{request_id}", created=wall_time_s(), model=context.model_name)
    shape = CompletionShape(head=head, with_token_ids=bool(body.return_token_ids))
    return await _answer(context, body, request, jobs, shape)


async def chat(context: ApiContext, body: ChatBody, request: Request) -> Response:
    """POST /v1/chat/completions. Raises KvpactError before anything is sent."""
    _check(context, body)
    request_id: str = request.state.request_id
    job = await chat_job(
        body, context.model, context.config.api, request_id, context_tokens=context.context_tokens()
    )
    head = Head(id=f"chatcmpl-{request_id}", created=wall_time_s(), model=context.model_name)
    return await _answer(
        context, body, request, [job], ChatShape(head=head, with_token_ids=bool(body.return_token_ids))
    )


def _check(context: ApiContext, body: GenerationBody) -> None:
    context.check_model(body.model)
    refuse_unsupported(body)
    unknown = unknown_fields(body)
    if unknown:
        logger.warning("ignoring unknown request fields: %s", ", ".join(unknown)[:200])


async def _answer(
    context: ApiContext, body: GenerationBody, request: Request, jobs: Sequence[Job], shape: Shape
) -> Response:
    choices = [Choice(prompt=job.request.prompt) for job in jobs]
    if body.stream:
        return EventStream(
            _events(context, body, jobs, choices, shape), lambda error: _told(context, request, error)
        )
    try:
        await while_connected(request.receive, _collect(context, jobs, choices))
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)
    except KvpactError as error:
        return _told(context, request, error).response()
    return Response(json.dumps(shape.whole(choices), ensure_ascii=False), media_type="application/json")


def _told(context: ApiContext, request: Request, error: KvpactError) -> ApiError:
    told = context.told(error, request)
    context.metrics.request_failed(endpoint=request.url.path, code=told.code)
    return told


async def _collect(context: ApiContext, jobs: Sequence[Job], choices: Sequence[Choice]) -> None:
    async with contextlib.aclosing(_parts(context, jobs)) as parts:
        async for index, part in parts:
            choices[index].take(part)


async def _events(
    context: ApiContext, body: GenerationBody, jobs: Sequence[Job], choices: Sequence[Choice], shape: Shape
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    usage_always = options is not None and bool(options.continuous_usage_stats)
    begun: set[int] = set()
    async with contextlib.aclosing(_parts(context, jobs)) as parts:
        async for index, part in parts:
            choices[index].take(part)
            if index not in begun:
                begun.add(index)
                opening = shape.opening(index)
                if opening is not None:
                    yield as_event(opening)
            if part.text or part.finish_reason is not None or body.return_token_ids:
                chunk = shape.chunk(index, part)
                yield as_event(chunk | {"usage": usage_of(choices)} if usage_always else chunk)
    if options is not None and options.include_usage:
        yield as_event(shape.usage_chunk(choices))


def _parts(context: ApiContext, jobs: Sequence[Job]) -> Parts:
    return _one(context, jobs[0]) if len(jobs) == 1 else _several(context, jobs)


async def _one(context: ApiContext, job: Job, index: int = 0) -> Parts:
    account = context.account(job.request)
    async with contextlib.aclosing(
        generate_text(context.lifecycle, job.request, job.rules, account)
    ) as parts:
        async for part in parts:
            yield index, part


async def _several(context: ApiContext, jobs: Sequence[Job]) -> Parts:
    """All prompts at once; the first failure ends the others."""
    queue: asyncio.Queue[tuple[int, TextPart] | Exception | None] = asyncio.Queue(maxsize=len(jobs))
    tasks = [asyncio.create_task(_pump(context, job, index, queue)) for index, job in enumerate(jobs)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    context: ApiContext, job: Job, index: int, queue: asyncio.Queue[tuple[int, TextPart] | Exception | None]
) -> None:
    """Passes the parts of one prompt on, then None, or the exception that ended it."""
    try:
        async with contextlib.aclosing(_one(context, job, index)) as parts:
            async for item in parts:
                await queue.put(item)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
