"""Marks each test by its folder, and fails it when it leaves a task or a thread behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No test asks a hub; a checkpoint comes from an installed package or is made on the spot.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tells the tests alone where schemas lie; kvpact refuses a KVPACT_ variable that names no setting.
CRDS_FOLDER = os.environ.pop("KVPACT_CRDS", "")

FOLDERS = ("unit", "property", "contract", "cluster", "k8s", "repo")
GRACE_S = 5.0
"""How long a thread or task that was told to end may take."""

# A slow machine isn't a wrong answer, and the same examples everywhere make a failure repeatable.
settings.register_profile("kvpact", deadline=None, derandomize=True)
settings.load_profile("kvpact")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test the mark of its folder."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Takes modules and collected tests out of the garbage collector's sight, which finds nothing there."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Needs no other fixture, so that it looks last: after the event loop and its executor are closed."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(GRACE_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert alive == [], f"threads left behind: {', '.join(alive)}"


@pytest.fixture(autouse=True)
def no_task_left_behind(request: pytest.FixtureRequest, no_thread_left_behind: None) -> None:
    """Watches the loop of a coroutine test; other tests need no loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("watched_loop")


@pytest.fixture
async def watched_loop() -> AsyncIterator[None]:
    """Looks for tasks that are still pending when the test's own fixtures are torn down."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    assert not left, f"tasks left behind: {', '.join(str(task.get_coro()) for task in left)}"
