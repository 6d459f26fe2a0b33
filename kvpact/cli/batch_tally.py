"""How far a batch is, and which lines came to nothing for which reason."""

from __future__ import annotations

from typing import Any

from kvpact.cli.batch_file import failed

MOST_NAMED = 10
"""Lines of one reason that people are told; --json has all."""


class Tally:
    """Counts records; each line once."""

    def __init__(self) -> None:
        self.lines = 0
        self._failed: dict[int, str] = {}
        """Line -> reason."""

    @property
    def failed(self) -> int:
        """How many lines came to nothing."""
        return len(self._failed)

    def add(self, record: dict[str, Any]) -> None:
        """Takes in one line's record."""
        self.lines += 1
        if failed(record):
            self._failed[record["line"]] = _reason(record)

    def has_failed(self, line: int) -> bool:
        """Whether the record of a line says that it came to nothing."""
        return line in self._failed

    def failures(self) -> dict[str, list[int]]:
        """Reason, such as invalid_line or http_400, -> lines in order; the commonest reason first."""
        by_reason: dict[str, list[int]] = {}
        for line, reason in sorted(self._failed.items()):
            by_reason.setdefault(reason, []).append(line)
        return dict(sorted(by_reason.items(), key=lambda each: (-len(each[1]), each[0])))

    def text(self) -> str:
        """For people: `4 failed: 3 invalid_line (lines 4, 8, 10), 1 HTTP 400 (line 6)`."""
        found = [_told(reason, lines) for reason, lines in self.failures().items()]
        return f"{self.failed} failed" + (f": {', '.join(found)}" if found else "")


def _reason(record: dict[str, Any]) -> str:
    response = record["response"]
    if response is not None:
        return f"http_{response['status_code']}"
    error = record["error"]
    return "no_answer" if error is None else str(error["code"])


def _told(reason: str, lines: list[int]) -> str:
    named = [str(line) for line in lines[:MOST_NAMED]] + ["..."] * (len(lines) > MOST_NAMED)
    word = "line" if len(lines) == 1 else "lines"
    return f"{len(lines)} {reason.replace('http_', 'HTTP ')} ({word} {', '.join(named)})"
