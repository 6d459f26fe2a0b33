"""SIGINT and SIGTERM while a command runs on an event loop: each one does the next of some steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stops:
    """What the next signal does. The last step, which repeats, cancels the command."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._steps: list[Callable[[], object]] = []

    def serving(self, *steps: Callable[[], object]) -> None:
        """From now on the next signals do `steps`, one each, before one cancels."""
        self._steps = list(steps)

    def signalled(self) -> None:
        """A signal came."""
        (self._steps.pop(0) if self._steps else self._cancel)()


@contextlib.contextmanager
def stops() -> Iterator[Stops]:
    """Takes both signals while the running task is inside."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    steps = Stops(task.cancel)
    for number in SIGNALS:
        loop.add_signal_handler(number, steps.signalled)
    try:
        yield steps
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Puts the handlers of both signals back on leaving: Ray's start replaces them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
