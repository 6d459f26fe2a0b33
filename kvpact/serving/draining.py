"""Lets a worker finish what it has before it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.1


class Drains(Protocol):
    """Something that can be told to take no new work."""

    async def drain(self) -> int:
        """Takes no new work from now on; requests that still run. Idempotent."""


async def finish(worker: Drains, *, within_s: float, hurry: asyncio.Event) -> int:
    """Tells a worker to take no new work and returns when it has none, is in a hurry, or the time is over.

    Gives the requests that it still has: 0 where nothing is lost by ending it.
    """
    left = await worker.drain()
    if left:
        logger.info("finishing %d requests, for %g s at most", left, within_s)
    try:
        async with asyncio.timeout(within_s):
            while left and not hurry.is_set():
                await _pause(hurry)
                left = await worker.drain()
    except TimeoutError:
        logger.warning("ending with %d requests that took longer than %g s", left, within_s)
    return left


async def _pause(hurry: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(ASK_AGAIN_S):
            await hurry.wait()
    except TimeoutError:
        return
