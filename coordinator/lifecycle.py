"""One request from its prompt tokens to its last token. It ends exactly once: done, failed or cancelled.

    place -> Prefill stream -> (commit) first token -> Decode stream -> tokens
    place -> Generate stream -> tokens                     a short prompt, on a decode worker alone

A failure gives the handoff up and, where another attempt may work, goes on elsewhere under a new handoff id:
with the prompt alone, or with the prompt and the tokens that the user already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from coordinator.attempt import Attempt, GenerationRequest
from coordinator.fleet import SETTLING_S, Fleet
from coordinator.ports import RegisteredWorker
from coordinator.registry import Snapshot
from coordinator.releases import Releases
from coordinator.retries import CORRUPTING, ELSEWHERE, Retries
from coordinator.router import Placement, choose_decode, choose_pair, choose_prefill
from kvpact.clock import Clock
from kvpact.errors import Exhausted, Fenced, KvpactError, NoCompatiblePair, Unavailable
from kvpact.handoff.jobs import Committed, DecodedTokens
from kvpact.metrics import Metrics
from kvpact.types import FinishReason, HandoffId

logger = logging.getLogger(__name__)

MAX_RUNNING = 1024
"""Requests at once; further ones are turned away."""


class Lifecycle:
    """Runs requests on the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        metrics: Metrics,
        new_handoff_id: Callable[[], HandoffId],
        *,
        local_prefill_max_tokens: int = 0,
    ) -> None:
        """`local_prefill_max_tokens`: longest prompt that a decode worker computes itself."""
        self._fleet = fleet
        self._clock = clock
        self._metrics = metrics
        self._new_handoff_id = new_handoff_id
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._releases = Releases(fleet)
        self._running = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    async def settle(self) -> None:
        """Returns when no request runs and every handoff that was given up has been released."""
        await self._at_rest.wait()
        await self._releases.settle()

    async def run(
        self, request: GenerationRequest, on_commit: Callable[[Committed], None]
    ) -> AsyncGenerator[DecodedTokens, None]:
        """Yields output tokens; the last item has the finish reason. Leaving it early cancels both workers.

        `on_commit` is told of each handoff that committed.

        Raises:
            NoCompatiblePair: no two workers agreed on a cache.
            Exhausted: too many requests run, or two decode workers in a row were full.
            KvpactError: the request failed on the workers, twice where another try was worth it.
        """
        if self._running >= MAX_RUNNING:
            raise Exhausted(f"{self._running} requests run already", retry_after_s=1.0)
        self._running += 1
        self._at_rest.clear()
        try:
            async with contextlib.aclosing(self._attempts(request, on_commit)) as produced:
                async for tokens in produced:
                    yield tokens
        finally:
            self._running -= 1
            if self._running == 0:
                self._at_rest.set()

    async def _attempts(
        self, request: GenerationRequest, on_commit: Callable[[Committed], None]
    ) -> AsyncGenerator[DecodedTokens, None]:
        sent: list[int] = []
        retries = Retries()
        finished = False
        began: RegisteredWorker | None = None
        while not finished:
            if len(sent) == request.sampling.max_output_tokens:
                yield DecodedTokens(token_ids=(), finish_reason=FinishReason.LENGTH)
                return
            placement = await self._place(request, len(sent), retries, began)
            if not sent:
                began = placement.workers()[0]
            attempt = Attempt(
                self._fleet,
                self._releases,
                self._metrics,
                request=request,
                placement=placement,
                handoff_id=self._new_handoff_id(),
                sent=tuple(sent),
                on_commit=on_commit,
            )
            try:
                async with contextlib.aclosing(attempt.run()) as produced:
                    async for tokens in produced:
                        sent.extend(tokens.token_ids)
                        if tokens.token_ids:
                            retries.progressed()
                        finished = finished or tokens.finish_reason is not None
                        yield tokens
            except ELSEWHERE as error:
                if not attempt.workers_answered:
                    self._blame(placement, error)
                if not retries.failed(placement, error):
                    raise
                logger.warning(
                    "request %s goes elsewhere after %d tokens: %s", request.request_id, len(sent), error
                )

    def _blame(self, placement: Placement, error: KvpactError) -> None:
        """Takes the pair out of use where the failure says that others would fail on it too."""
        key = placement.key()
        if isinstance(error, CORRUPTING):
            if key is not None:
                self._fleet.quarantine(key, error)
        elif isinstance(error, (Unavailable, Fenced)):
            alone = placement.workers()[0].life
            pairs = [pair.key for pair in self._fleet.snapshot().pairs]
            for each in [key] if key else [each for each in pairs if alone in (each.prefill, each.decode)]:
                self._fleet.suspect(each, error)

    async def _place(
        self, request: GenerationRequest, sent: int, retries: Retries, began: RegisteredWorker | None
    ) -> Placement:
        """Picks workers; waits while the fleet settles after workers came or went.

        `began`: the worker that computed the first of the `sent` tokens.

        Raises what kept it from finding any, or the failure that made it look again.
        """
        deadline_s = self._clock.now() + (SETTLING_S if retries.may_wait() else 0.0)
        while True:
            snapshot = self._fleet.snapshot()
            try:
                return self._choose(snapshot, request, sent, retries, began if sent else None)
            except KvpactError as error:
                patience_s = min(self._fleet.settling_s(), deadline_s - self._clock.now())
                if isinstance(error, NoCompatiblePair) or patience_s <= 0:
                    raise (retries.failure or error) from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._fleet.change()

    def _choose(
        self,
        snapshot: Snapshot,
        request: GenerationRequest,
        sent: int,
        retries: Retries,
        began: RegisteredWorker | None,
    ) -> Placement:
        """By what is left to do: one token, a short prompt, or a handoff."""
        table_length = request.table_length
        if request.sampling.max_output_tokens - sent == 1:
            return choose_prefill(snapshot, table_length=table_length, began=began)
        barred, prompt_tokens = retries.barred(snapshot), len(request.prompt) + sent
        if prompt_tokens <= self._local_prefill_max_tokens:
            return choose_decode(snapshot, barred, table_length=table_length, prompt_tokens=prompt_tokens)
        return choose_pair(snapshot, barred, table_length=table_length)
