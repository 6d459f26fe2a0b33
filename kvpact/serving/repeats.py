"""Says what happens again and again once, again when it changes, and else once in a while."""

from __future__ import annotations

from kvpact.clock import Clock

AGAIN_S = 60.0


class Repeats:
    """Remembers what a log has already."""

    def __init__(self, clock: Clock, *, again_s: float = AGAIN_S) -> None:
        self._clock = clock
        self._again_s = again_s
        self._text: str | None = None
        self._said_s = 0.0

    def is_news(self, text: str) -> bool:
        """Whether `text` isn't what was said last, or that was `again_s` ago; then it counts as said now."""
        now = self._clock.now()
        if text == self._text and now < self._said_s + self._again_s:
            return False
        self._text, self._said_s = text, now
        return True

    def is_over(self) -> None:
        """Forgets: the trouble has ended, and the next one is news."""
        self._text = None
