"""Ends a text at the first stop string; holds back what may become one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None


class StopStrings:
    """Watches one text. The string that is complete first wins, however the text is cut into pieces."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> Passed:
        """Takes the next piece. After a stop nothing more may be pushed."""
        if not self._stops or not text:
            return Passed(text=text, stopped_by=None)
        seen = self._held + text
        ends = [(seen.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen]
        if ends:
            end, _, stop = min(ends)
            return Passed(text=seen[: end if self._include else end - len(stop)], stopped_by=stop)
        keep = max(_overlap(seen, stop) for stop in self._stops)
        self._held = seen[len(seen) - keep :]
        return Passed(text=seen[: len(seen) - keep], stopped_by=None)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
