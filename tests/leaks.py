"""What a process holds beside memory: threads, daemons included, open files, shared-memory segments."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpact.clock import MonotonicClock

CLOCK = MonotonicClock()
GRACE_S = 5.0
"""How long threads and sockets that were told to end may take."""
SHARED_MEMORY = Path("/dev/shm")
DESCRIPTORS = Path("/proc/self/fd")


def holdings() -> Counter[str]:
    """Each thread, descriptor (by what it is open on) and segment, with how often it is there."""
    found = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    found.update(f"segment {entry.name}" for entry in SHARED_MEMORY.iterdir())
    for entry in os.listdir(DESCRIPTORS):
        try:
            target = os.readlink(DESCRIPTORS / entry)
        except OSError:  # the descriptor of the listing itself
            continue
        # Numbers of sockets and pipes are of one life only; what counts is how many there are.
        found[f"descriptor {target.split(':[')[0]}"] += 1
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails where more is held at the end than at the start; asks until it is gone, or GRACE_S are over."""
    before = holdings()
    yield
    end_s = CLOCK.now() + GRACE_S
    while left := holdings() - before:
        assert CLOCK.now() < end_s, f"left behind: {dict(left)}"
        gc.collect()
        threading.Event().wait(0.01)
