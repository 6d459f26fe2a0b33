"""Times and counts of one generation, told to the metrics once."""

from __future__ import annotations

from kvpact.clock import Clock
from kvpact.handoff.jobs import Committed
from kvpact.metrics import Metrics
from kvpact.types import FinishReason


class Account:
    """Opened when a prompt is accepted, closed on leaving it as a context, whatever ended the generation."""

    def __init__(
        self, metrics: Metrics, clock: Clock, *, endpoint: str, prompt_tokens: int, max_output_tokens: int
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._endpoint = endpoint
        self._start_s = self._last_s = clock.now()
        self.ttft_s = 0.0
        self.committed: Committed | None = None
        self._tokens = 0
        self._finish_reason = FinishReason.CANCELLED
        metrics.request_started(prompt_tokens=prompt_tokens, max_output_tokens=max_output_tokens)

    def __enter__(self) -> Account:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._metrics.request_broke()
            return
        self._metrics.request_ended(
            endpoint=self._endpoint,
            finish_reason=self._finish_reason,
            tokens=self._tokens,
            ttft_s=self.ttft_s,
            e2e_s=self._last_s - self._start_s,
        )

    def take(self, count: int) -> None:
        """Counts output tokens that came together; 0 is nothing."""
        if count == 0:
            return
        now = self._clock.now()
        if self._tokens == 0:
            self.ttft_s = now - self._start_s
            self._metrics.first_tokens(count, self.ttft_s)
        else:
            self._metrics.next_tokens(count, now - self._last_s)
        self._last_s = now
        self._tokens += count

    def commit(self, committed: Committed) -> None:
        """Counts a handoff that the decode worker owns; after a retry the last one stands."""
        self.committed = committed
        self._metrics.handoff_committed(
            payload_bytes=committed.payload_bytes,
            handoff_s=committed.handoff_s,
            exposed_s=committed.exposed_s,
            max_abs_error=committed.max_abs_error,
        )

    def finish(self, reason: FinishReason) -> None:
        """Settles how the generation ended. Without this call it was cancelled."""
        self._finish_reason = reason
