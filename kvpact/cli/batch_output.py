"""The output file of a batch: a record a line, each on disk before the next."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kvpact.cli.batch_file import Broken, Job, check_same, failed, finished, parse_record
from kvpact.cli.batch_tally import Tally
from kvpact.errors import BadRequest, UnreadableSource


class BatchOutput:
    """Owns the file and its lock from entry to exit. Lines with a final record in it aren't due again.

    A half-written last line, and records that only say that servers were full or gone, are dropped on entry;
    with `retry_failed` so are those of every line that failed.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        self._path = path
        self._retry_failed = retry_failed
        self._file: IO[bytes] | None = None
        self.kept: dict[int, str | None] = {}
        """custom_id of each line with a final record of an earlier run."""
        self.tally = Tally()
        """Of the records in the file."""

    def __enter__(self) -> BatchOutput:
        """Opens, locks and reads the file.

        Raises:
            UnreadableSource: it can't be opened, or holds something else than records.
            BadRequest: another run writes it now.
        """
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._lock(self._file)
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise self._in_use()  # that run put another file in its place meanwhile
            self._file = self._take_up(self._file)
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from error
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # each record was flushed, or `append` said that it wasn't
                self._file.close()

    def is_due(self, line: Job | Broken) -> bool:
        """Whether a line has no final record yet. Raises BadRequest where the file is another batch's."""
        if line.line not in self.kept:
            return True
        mendable = self.tally.has_failed(line.line)
        check_same(line, self.kept[line.line], self._path, may_be_mended=mendable)
        return False

    def append(self, record: dict[str, Any]) -> None:
        """Puts one record on disk. Raises UnreadableSource where it has no room."""
        assert self._file is not None, "entered first"
        try:
            self._file.write(_line(record))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self.tally.add(record)

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use() from error

    def _unwritable(self, error: OSError) -> UnreadableSource:
        return UnreadableSource(
            f"can't write batch output {self._path}: {error.strerror}", source=str(self._path)
        )

    def _in_use(self) -> BadRequest:
        return BadRequest(
            f"{self._path} is written by another run now; wait for it, or name another output file",
            param="output",
        )

    def _take_up(self, file: IO[bytes]) -> IO[bytes]:
        """Reads the records; the file to go on with, which holds the final ones only."""
        file.seek(0)
        dropped: set[int] = set()
        for number, data in enumerate(file, start=1):
            record = parse_record(data) if data.endswith(b"\n") else None
            if record is None and data.endswith(b"\n"):
                raise UnreadableSource(
                    f"{self._path}, line {number}, is no record of a batch run; name an output file that "
                    "doesn't exist, or one of a run to go on with",
                    source=str(self._path),
                )
            if record is None or not self._stays(record) or record["line"] in self.kept:
                dropped.add(number)
            else:
                self.kept[record["line"]] = record["custom_id"]
                self.tally.add(record)
        return self._replaced(file, dropped) if dropped else file

    def _stays(self, record: dict[str, Any]) -> bool:
        return finished(record) and not (self._retry_failed and failed(record))

    def _replaced(self, file: IO[bytes], dropped: Set[int]) -> IO[bytes]:
        """Another file under the same name, without the lines in `dropped`, counted from 1.

        It is locked before it gets the name, and the old one stays whole until then.
        """
        beside = self._path.with_name(self._path.name + ".part")
        fresh = beside.open("w+b")
        try:
            self._lock(fresh)
            file.seek(0)
            fresh.writelines(data for number, data in enumerate(file, start=1) if number not in dropped)
            fresh.flush()
            os.fsync(fresh.fileno())
            beside.replace(self._path)
        except BaseException:
            fresh.close()
            raise
        file.close()
        return fresh


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
