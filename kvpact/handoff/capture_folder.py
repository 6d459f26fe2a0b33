"""A worker's folder of capture files, bounded: the oldest go before a byte would pass the bound.

    20261129T204501.123Z-<handoff id>.kvpact       whole
    .20261129T204501.123Z-<handoff id>.kvpact.part being written, or left by a crash

Used from one thread. Names sort by time.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvpact.errors import BadRequest
from kvpact.handoff.capture_codec import Record
from kvpact.handoff.capture_file import SUFFIX, Framing

PART_SUFFIX = ".part"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def safe_name(text: str) -> str:
    """`text` as a part of a file's name: letters, digits, _ and -."""
    return _UNSAFE.sub("_", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBounds:
    """Most that lies in one worker's folder, files that are being written included."""

    max_bytes: int = 1 << 30
    max_files: int = 1000


def check_capture(folder: Path | None) -> None:
    """Makes the folder that captures go to and writes to it. Raises BadRequest where that can't be done."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise BadRequest(
            f"--capture (handoff.capture): can't write to {folder}: {why}; "
            "name a folder that this user may write to",
            param="handoff.capture",
        ) from error


class CaptureFolder:
    """Makes files and keeps them within bounds. What fails raises OSError."""

    def __init__(self, path: Path, bounds: CaptureBounds) -> None:
        self.path = path
        self.removed = 0
        """Whole files that went to make room."""
        self._bounds = bounds
        self._files: OrderedDict[str, int] = OrderedDict()
        """Whole files by name with their bytes, the oldest first."""
        self._whole_bytes = 0
        self._parts = 0
        self._part_bytes = 0
        self._last_ms = 0

    def prepare(self) -> None:
        """Makes the folder, takes over what is there, removes what a crash left. Idempotent."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        self.path.mkdir(exist_ok=True, mode=FOLDER_MODE)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{self.path} is a link or belongs to somebody else")
        self.path.chmod(FOLDER_MODE)
        for left in self.path.glob(f".*{SUFFIX}{PART_SUFFIX}"):
            left.unlink(missing_ok=True)
        files = sorted(self.path.glob(f"*{SUFFIX}"))
        self._files = OrderedDict((file.name, file.lstat().st_size) for file in files)
        self._whole_bytes = sum(self._files.values())
        self.make_room(0)

    def create(self, label: str, now_ms: int) -> OpenCapture:
        """Begins a file; `label` says what it is of, `now_ms` are milliseconds since the epoch."""
        self._last_ms = max(now_ms, self._last_ms + 1)
        seconds, ms = divmod(self._last_ms, 1000)
        moment = datetime.fromtimestamp(seconds, UTC)
        name = f"{moment:%Y%m%dT%H%M%S}.{ms:03d}Z-{safe_name(label)}{SUFFIX}"
        return OpenCapture(self, self.path / name)

    def make_room(self, more_bytes: int) -> None:
        """Removes the oldest files until `more_bytes` fit. Raises OSError where they never do."""
        bounds = self._bounds
        while self._files and (
            self._whole_bytes + self._part_bytes + more_bytes > bounds.max_bytes
            or len(self._files) + self._parts > bounds.max_files
        ):
            name, size_bytes = self._files.popitem(last=False)
            self._whole_bytes -= size_bytes
            (self.path / name).unlink(missing_ok=True)
            self.removed += 1
        if self._part_bytes + more_bytes > bounds.max_bytes:
            raise OSError(f"handoffs being captured take more than {bounds.max_bytes} bytes")

    def began(self) -> None:
        """A file is being written."""
        self._parts += 1

    def grew(self, more_bytes: int) -> None:
        """A file that is being written grew."""
        self._part_bytes += more_bytes

    def ended(self, name: str, size_bytes: int, *, whole: bool) -> None:
        """A file of `size_bytes` isn't being written any more."""
        self._parts -= 1
        self._part_bytes -= size_bytes
        if whole:
            self._files[name] = size_bytes
            self._whole_bytes += size_bytes
            self.make_room(0)


class OpenCapture:
    """One file that is being written, under its temporary name until `finish`."""

    def __init__(self, folder: CaptureFolder, path: Path) -> None:
        self._folder = folder
        self._path = path
        self._part = path.with_name(f".{path.name}{PART_SUFFIX}")
        self._framing = Framing()
        self._size = 0
        folder.began()
        self._stream = -1
        try:
            folder.path.mkdir(exist_ok=True, mode=FOLDER_MODE)
            self._stream = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
            self._write(self._framing.head)
        except OSError:
            self.abandon()
            raise

    def add(self, record: Record) -> None:
        """Writes the next record."""
        for data in self._framing.record(record):
            self._write(data)

    def finish(self) -> None:
        """Writes the end; the file has its name from here."""
        self._write(self._framing.end())
        os.close(self._stream)
        self._stream = -1
        self._part.rename(self._path)
        self._folder.ended(self._path.name, self._size, whole=True)

    def abandon(self) -> None:
        """Removes the file. Not after `finish`."""
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1
        self._folder.ended(self._path.name, self._size, whole=False)
        self._part.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._folder.make_room(len(data))
        view = memoryview(data)
        while view:
            written = os.write(self._stream, view)
            view = view[written:]
            self._size += written
            self._folder.grew(written)
