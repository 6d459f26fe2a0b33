"""Captures on their way to disk: a thread of its own writes, and nobody ever waits for it.

What the disk can't take in time or at all is given up and counted: a handoff never fails of being captured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvpact.handoff.capture_codec import Record
from kvpact.handoff.capture_folder import CaptureFolder, OpenCapture

QUEUE_CAP_BYTES = 64 << 20
"""Most bytes of all captures that wait for the disk."""
logger = logging.getLogger(__name__)


class CaptureWriter:
    """Owns the thread and the folder from `__init__` to `close`; called from one event loop."""

    def __init__(self, folder: CaptureFolder, *, now_ms: Callable[[], int]) -> None:
        self.written = 0
        self.lost = 0
        self._folder = folder
        self._now_ms = now_ms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpact-capture")
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._closed = False
        self._prepared = False
        self._thread.submit(self._prepare)

    def begin(self, label: str) -> Tape:
        """A capture of what `label` names."""
        return Tape(self, self._folder, label, self._now_ms())

    def close(self) -> None:
        """Writes what waits, then ends the thread. Idempotent. What comes later goes nowhere."""
        with self._lock:
            self._closed = True
        self._thread.shutdown()
        logger.info(
            "captured to %s: %d written, %d lost, %d of the oldest removed for room",
            *(self._folder.path, self.written, self.lost, self._folder.removed),
        )

    def submit(self, size_bytes: int, job: Callable[[], None]) -> bool:
        """Queues a job that writes `size_bytes`; False where the queue is full, or closed."""
        with self._lock:
            if self._closed or self._waiting_bytes + size_bytes > QUEUE_CAP_BYTES:
                return False
            self._waiting_bytes += size_bytes
            self._thread.submit(self._run, size_bytes, job)
        return True

    def lose(self, why: object) -> None:
        """Counts a capture that was given up; the first is told."""
        with self._lock:
            self.lost += 1
            first = self.lost == 1
        if first:
            logger.warning(
                "a handoff isn't captured (the handoff itself goes on; later ones are only counted): %s", why
            )

    def _run(self, size_bytes: int, job: Callable[[], None]) -> None:
        try:
            if not self._prepared:
                self._prepare()
            job()
        finally:
            with self._lock:
                self._waiting_bytes -= size_bytes

    def _prepare(self) -> None:
        """Makes the folder ready; a failure shows again with the next capture, so that it may be mended."""
        try:
            self._folder.prepare()
            self._prepared = True
        except OSError as error:
            logger.debug("capture folder %s isn't ready: %s", self._folder.path, error)


class Tape:
    """One capture: `add` each record, then `end`. Records after a loss go nowhere."""

    def __init__(self, writer: CaptureWriter, folder: CaptureFolder, label: str, now_ms: int) -> None:
        self._writer = writer
        self._folder = folder
        self._label = label
        self._now_ms = now_ms
        self._lost = False
        self._given_up = False
        self._file: OpenCapture | None = None
        """Of the writer's thread."""

    def add(self, records: Iterable[Record]) -> None:
        """Queues records, in order."""
        for record in records:
            if self._lost:
                return
            if not self._writer.submit(len(record.data), partial(self._guard, partial(self._add, record))):
                self._lost = True
                self._writer.submit(0, partial(self._give_up, "the disk can't follow"))

    def end(self, record: Record) -> None:
        """Queues the last record; the file appears once it is whole."""
        self.add((record,))
        if not self._lost:
            self._writer.submit(0, partial(self._guard, self._finish))

    def _add(self, record: Record) -> None:
        if self._file is None:
            self._file = self._folder.create(self._label, self._now_ms)
        self._file.add(record)

    def _finish(self) -> None:
        assert self._file is not None, "records come before the end"
        self._file.finish()
        self._file = None
        self._writer.written += 1

    def _guard(self, job: Callable[[], None]) -> None:
        """Runs a job of the writer's thread, or nothing once one failed."""
        if self._lost:
            return
        try:
            job()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, why: object) -> None:
        """The file goes; on the writer's thread."""
        self._lost = True
        if self._given_up:
            return
        self._given_up = True
        file, self._file = self._file, None
        try:
            if file is not None:
                file.abandon()
        except OSError as error:
            logger.debug("can't remove an unfinished capture: %s", error)
        self._writer.lose(why)
