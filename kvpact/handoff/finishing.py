"""Awaiting what must come to its end, however often whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T], keep: Callable[[T], None] | None = None) -> T:
    """What `work` gives or raises, once it is done; a cancellation meanwhile comes out instead, and then.

    Args:
        keep: is given what `work` gives, also where a cancellation comes out.
    """
    working = asyncio.ensure_future(work)
    cancelled = False
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            cancelled = True
    failed = working.cancelled() or working.exception() is not None
    if keep is not None and not failed:
        keep(working.result())
    if cancelled:
        raise asyncio.CancelledError
    return working.result()
