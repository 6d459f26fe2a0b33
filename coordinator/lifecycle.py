"""One request from its prompt tokens to its last token. It ends exactly once: done, failed or cancelled.

    place -> Prefill stream -> (commit) first token -> Decode stream -> tokens

A failure gives the handoff up and, at most once without a new token in between, goes on elsewhere under a new
handoff id: with the prompt alone, or with the prompt and the tokens that the user already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from coordinator.fleet import SETTLING_S, Fleet
from coordinator.ports import Committed, PrefillEvent, PrefillJob, RegisteredWorker, Stream
from coordinator.registry import PairKey
from coordinator.router import Placement, choose_pair, choose_prefill
from kvpact.clock import Clock
from kvpact.errors import (
    ContractRefused,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    NoCompatiblePair,
    Unavailable,
    UnknownHandoff,
)
from kvpact.handoff.messages import DecodedTokens, DecodeJob
from kvpact.metrics import Metrics
from kvpact.types import FinishReason, HandoffId, Sampling

logger = logging.getLogger(__name__)

MAX_RUNNING = 1024
"""Requests at once; further ones are turned away."""
ELSEWHERE = (Unavailable, Fenced, DataLoss, UnknownHandoff, ContractRefused)
"""Failures of workers, not of the request: another attempt may work."""
FOR_GOOD = (DataLoss, ContractRefused)
"""Of these, the failures after which a request keeps away from the pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt. `table_length` is fixed here and travels with every attempt."""

    request_id: str
    endpoint: str
    """HTTP route it came by, for metrics."""
    prompt: tuple[int, ...]
    table_length: int
    sampling: Sampling


class Lifecycle:
    """Runs requests on the fleet."""

    def __init__(
        self, fleet: Fleet, clock: Clock, metrics: Metrics, new_handoff_id: Callable[[], HandoffId]
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._metrics = metrics
        self._new_handoff_id = new_handoff_id
        self._releases: set[asyncio.Task[None]] = set()
        self._running = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    async def settle(self) -> None:
        """Returns when no request runs and every handoff that was given up has been released."""
        await self._at_rest.wait()
        while self._releases:
            await asyncio.gather(*self._releases)

    async def run(
        self, request: GenerationRequest, on_commit: Callable[[Committed], None]
    ) -> AsyncGenerator[DecodedTokens, None]:
        """Yields output tokens; the last item has the finish reason. Leaving it early cancels both workers.

        `on_commit` is told of each handoff that committed.

        Raises:
            NoCompatiblePair: no two workers agreed on a cache.
            Exhausted: too many requests run.
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
        failure: KvpactError | None = None
        barred: set[PairKey] = set()
        may_retry = True
        finished = False
        while not finished:
            if len(sent) == request.sampling.max_output_tokens:
                yield DecodedTokens(token_ids=(), finish_reason=FinishReason.LENGTH)
                return
            placement = await self._place(request, len(sent), barred, failure)
            try:
                attempt = _Attempt(self, request, placement, self._new_handoff_id(), tuple(sent), on_commit)
                async with contextlib.aclosing(attempt.run()) as produced:
                    async for tokens in produced:
                        sent.extend(tokens.token_ids)
                        may_retry = may_retry or bool(tokens.token_ids)
                        finished = finished or tokens.finish_reason is not None
                        yield tokens
            except ELSEWHERE as error:
                self._blame(placement, error, barred)
                if not may_retry:
                    raise
                logger.warning(
                    "request %s goes elsewhere after %d tokens: %s", request.request_id, len(sent), error
                )
                failure, may_retry = error, False

    def _blame(self, placement: Placement, error: KvpactError, barred: set[PairKey]) -> None:
        key = placement.key()
        keys = (
            [key]
            if key
            else [p.key for p in self._fleet.snapshot().pairs if p.key.prefill == placement.prefill.life]
        )
        for each in keys:
            self._fleet.suspect(each, error)
        if key is not None and isinstance(error, FOR_GOOD):
            barred.add(key)

    async def _place(
        self, request: GenerationRequest, sent: int, barred: set[PairKey], failure: KvpactError | None
    ) -> Placement:
        """Picks workers; waits while the fleet settles after workers came or went.

        Raises what kept it from finding any, or the failure that made it look again.
        """
        one_token = request.sampling.max_output_tokens - sent == 1
        deadline_s = self._clock.now() + (SETTLING_S if not isinstance(failure, FOR_GOOD) else 0.0)
        while True:
            snapshot = self._fleet.snapshot()
            try:
                return choose_prefill(snapshot) if one_token else choose_pair(snapshot, barred)
            except KvpactError as error:
                patience_s = min(self._fleet.settling_s(), deadline_s - self._clock.now())
                if isinstance(error, NoCompatiblePair) or patience_s <= 0:
                    raise (failure or error) from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._fleet.change()

    def give_up(self, workers: list[RegisteredWorker], handoff_id: HandoffId, reason: str) -> None:
        """Releases a handoff on these workers in the background."""
        for worker in workers:
            task = asyncio.create_task(self._release(worker, handoff_id, reason), name="release")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, worker: RegisteredWorker, handoff_id: HandoffId, reason: str) -> None:
        try:
            await self._fleet.port(worker.life).release(handoff_id, reason)
        except KvpactError as error:
            logger.info("handoff %s ends by its lease on %s: %s", handoff_id.hex(), worker.life.worker, error)


class _Attempt:
    """One try of one request on one placement under one handoff id."""

    def __init__(
        self,
        owner: Lifecycle,
        request: GenerationRequest,
        placement: Placement,
        handoff_id: HandoffId,
        sent: tuple[int, ...],
        on_commit: Callable[[Committed], None],
    ) -> None:
        self._owner = owner
        self._fleet = owner._fleet
        self._metrics = owner._metrics
        self._request = request
        self._prefill = placement.prefill
        self._decode = placement.decode
        self._handoff_id = handoff_id
        self._token_ids = request.prompt + sent
        self._on_commit = on_commit
        self._committed = False

    async def run(self) -> AsyncGenerator[DecodedTokens, None]:
        """Yields tokens to the sequence's end; on any other way out the handoff is released on both sides."""
        workers = [self._prefill, *([self._decode] if self._decode else [])]
        lives = [worker.life for worker in workers]
        self._fleet.assign(lives, +1)
        result = "CANCELLED"
        try:
            async with contextlib.aclosing(self._tokens()) as produced:
                async for tokens in produced:
                    if tokens.finish_reason is FinishReason.CANCELLED:
                        raise Unavailable("a worker gave the sequence up")
                    if tokens.finish_reason is not None:
                        result = "DONE"
                    yield tokens
            if result != "DONE":
                raise Unavailable("a worker ended the stream before the sequence's end")
        except KvpactError as error:
            if result == "DONE":
                logger.info("request %s had all its tokens when: %s", self._request.request_id, error)
                return
            result = error.reason
            raise
        finally:
            self._fleet.assign(lives, -1)
            if result != "DONE":
                self._owner.give_up(workers, self._handoff_id, result.lower())
                if self._decode is not None and not self._committed:
                    self._metrics.handoff_ended(result.lower())

    async def _tokens(self) -> AsyncGenerator[DecodedTokens, None]:
        port = self._fleet.prefill_port(self._prefill.life)
        async with contextlib.AsyncExitStack() as stack:
            events = await stack.enter_async_context(contextlib.aclosing(port.prefill(self._prefill_job())))
            first = await self._first_token(events)
            if first.finish_reason is not None:
                yield first
                await _finish(events)
                return
            # Before the token is passed on: a slow client mustn't let the lease run out.
            decoding = await stack.enter_async_context(contextlib.aclosing(self._begin_decode(first)))
            yield first
            await _finish(events)
            async for tokens in decoding:
                yield tokens

    async def _first_token(self, events: Stream[PrefillEvent]) -> DecodedTokens:
        async for event in events:
            if isinstance(event, Committed):
                self._committed = True
                self._on_commit(event)
            elif isinstance(event, DecodedTokens):
                return event
        raise Unavailable("a prefill worker ended without a token")

    def _begin_decode(self, first: DecodedTokens) -> Stream[DecodedTokens]:
        if self._decode is None:
            raise Unavailable("a prefill worker went on past the one token that was asked")
        job = DecodeJob(
            handoff_id=self._handoff_id,
            decode=self._decode.life,
            token_ids=self._token_ids + first.token_ids,
            original_prompt_tokens=len(self._request.prompt),
            sampling=self._request.sampling,
            request_id=self._request.request_id,
        )
        return self._fleet.decode_port(self._decode.life).decode(job)

    def _prefill_job(self) -> PrefillJob:
        return PrefillJob(
            handoff_id=self._handoff_id,
            prefill=self._prefill.life,
            decode=self._decode,
            token_ids=self._token_ids,
            original_prompt_tokens=len(self._request.prompt),
            table_length=self._request.table_length,
            sampling=self._request.sampling,
            request_id=self._request.request_id,
        )


async def _finish(events: Stream[PrefillEvent]) -> None:
    """Lets the prefill worker end by itself. What fails there now no longer matters: its work is done."""
    try:
        async for event in events:
            logger.warning("unexpected prefill event after the first token: %s", type(event).__name__)
    except KvpactError as error:
        logger.info("prefill stream ended after its first token with: %s", error)
