"""One sequence's events as an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvpact.engine.engine import Engine
from kvpact.engine.requests import EngineEvent, SequenceFailed, SequenceRequest, TokenComputed

EventQueue = asyncio.Queue[EngineEvent | None]


async def stream(
    engine: Engine, request: SequenceRequest, events: EventQueue | None = None
) -> AsyncGenerator[EngineEvent, None]:
    """Submits `request` and gives its events; ends after the last one, a failure included.

    Takes over `request.blocks` at the first step. Leaving early cancels the sequence. With `hold_blocks`,
    blocks of a sequence that ended stay held until `engine.release`.

    Args:
        events: queue to pass events through; None put into it ends the iteration and the sequence.

    Raises:
        BadRequest, Unavailable: as Engine.submit does, at the first step; the blocks are freed.
    """
    loop = asyncio.get_running_loop()
    queue: EventQueue = asyncio.Queue() if events is None else events

    def on_event(event: EngineEvent) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, event)

    try:
        sequence_id = engine.submit(request, on_event)
    except Exception:
        engine.pool.free(request.blocks, request.blocks_holder)
        raise
    ended = False
    try:
        while not ended and (event := await queue.get()) is not None:
            ended = _is_last(event, request)
            yield event
    finally:
        if not ended:
            engine.cancel(sequence_id)


def _is_last(event: EngineEvent, request: SequenceRequest) -> bool:
    if isinstance(event, SequenceFailed):
        return True
    return isinstance(event, TokenComputed) and (event.finish_reason is not None or request.stop_after_first)
