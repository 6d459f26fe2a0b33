"""One try of one request, on one placement, under one handoff id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from coordinator.fleet import Fleet
from coordinator.ports import RegisteredWorker, Stream
from coordinator.releases import Releases
from coordinator.router import OnDecode, OnPair, OnPrefill, Placement
from kvpact.errors import DataLoss, KvpactError, Unavailable
from kvpact.handoff.jobs import (
    Committed,
    DecodedTokens,
    DecodeJob,
    FirstToken,
    GenerateJob,
    PrefillEvent,
    PrefillJob,
)
from kvpact.metrics import Metrics
from kvpact.types import FinishReason, HandoffId, Sampling

logger = logging.getLogger(__name__)

PREFILL_END_S = 1.0
"""After the last token the prefill worker gets this long to end its stream, then the call is cancelled."""
LOST_AFTER_COMMIT = "lost_after_commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt. `table_length` is fixed here and travels with every attempt."""

    request_id: str
    endpoint: str
    """HTTP route it came by, for metrics."""
    prompt: tuple[int, ...]
    table_length: int
    sampling: Sampling


class Attempt:
    """Runs once. `sent` are the output tokens that the user already has."""

    def __init__(
        self,
        fleet: Fleet,
        releases: Releases,
        metrics: Metrics,
        *,
        request: GenerationRequest,
        placement: Placement,
        handoff_id: HandoffId,
        sent: tuple[int, ...],
        on_commit: Callable[[Committed], None],
    ) -> None:
        self._fleet = fleet
        self._releases = releases
        self._metrics = metrics
        self._request = request
        self._placement = placement
        self._handoff_id = handoff_id
        self._token_ids = request.prompt + sent
        self._on_commit = on_commit
        self._committed = False
        self.workers_answered = False
        """Whether it failed though both workers answered: it says nothing about other requests."""

    async def run(self) -> AsyncGenerator[DecodedTokens, None]:
        """Yields tokens to the sequence's end; on any other way out the handoff is released on both sides."""
        workers = self._placement.workers()
        lives = [worker.life for worker in workers]
        self._fleet.assign(lives, +1)
        result = "CANCELLED"
        try:
            async with contextlib.aclosing(self._tokens()) as produced:
                async for tokens in produced:
                    if tokens.finish_reason is FinishReason.CANCELLED:
                        self.workers_answered = True
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
            if isinstance(error, DataLoss) and error.check == "witness":
                self._metrics.witnesses_refused()
            raise
        finally:
            self._fleet.assign(lives, -1)
            if result != "DONE":
                self._give_up(result)

    def _give_up(self, result: str) -> None:
        """Releases the handoff on its workers; what a decode worker computes alone ends with its call."""
        if isinstance(self._placement, OnDecode):
            return
        self._releases.give_up(self._placement.workers(), self._handoff_id, result.lower())
        self._count(result)

    def _count(self, result: str) -> None:
        """Counts a handoff that came to nothing; one that the client no longer wanted did commit."""
        if isinstance(self._placement, OnPair) and not self._committed:
            self._metrics.handoff_ended(result.lower())
        elif self._committed and result != "CANCELLED":
            self._metrics.handoff_ended(LOST_AFTER_COMMIT)

    def _tokens(self) -> AsyncGenerator[DecodedTokens, None]:
        match self._placement:
            case OnPair(prefill=prefill, decode=decode):
                return self._prefilled(prefill, decode)
            case OnPrefill(prefill=prefill):
                return self._prefilled(prefill, None)
            case OnDecode(decode=decode):
                return self._generated(decode)

    async def _generated(self, decode: RegisteredWorker) -> AsyncGenerator[DecodedTokens, None]:
        port = self._fleet.decode_port(decode.life)
        began = False
        async with contextlib.aclosing(port.generate(self._generate_job(decode))) as produced:
            async for tokens in produced:
                if not began:
                    self._metrics.prefilled_locally()
                began = True
                yield tokens

    async def _prefilled(
        self, prefill: RegisteredWorker, decode: RegisteredWorker | None
    ) -> AsyncGenerator[DecodedTokens, None]:
        job = self._prefill_job(prefill, decode)
        async with contextlib.AsyncExitStack() as stack:
            port = self._fleet.prefill_port(prefill.life)
            events = await stack.enter_async_context(contextlib.aclosing(port.prefill(job)))
            first = await self._first_token(events)
            shown = DecodedTokens(token_ids=(first.token_id,), finish_reason=first.finish_reason)
            if first.finish_reason is not None:
                yield shown
            else:
                # Before the token is passed on: a slow client mustn't let the lease run out.
                begun = self._begin_decode(decode, first)
                decoding = await stack.enter_async_context(contextlib.aclosing(begun))
                yield shown
                async for tokens in decoding:
                    yield tokens
            await _finish(events)

    async def _first_token(self, events: Stream[PrefillEvent]) -> FirstToken:
        async for event in events:
            if isinstance(event, Committed):
                self._committed = True
                self._on_commit(event)
            elif isinstance(event, FirstToken):
                return event
        raise Unavailable("a prefill worker ended without a token")

    def _begin_decode(self, decode: RegisteredWorker | None, first: FirstToken) -> Stream[DecodedTokens]:
        if decode is None:
            raise Unavailable("a prefill worker went on past the one token that was asked")
        job = DecodeJob(
            handoff_id=self._handoff_id,
            decode=decode.life,
            token_ids=(*self._token_ids, first.token_id),
            original_prompt_tokens=len(self._request.prompt),
            sampling=self._request.sampling,
            request_id=self._request.request_id,
        )
        return self._fleet.decode_port(decode.life).decode(job)

    def _generate_job(self, decode: RegisteredWorker) -> GenerateJob:
        return GenerateJob(
            decode=decode.life,
            token_ids=self._token_ids,
            original_prompt_tokens=len(self._request.prompt),
            table_length=self._request.table_length,
            sampling=self._request.sampling,
            request_id=self._request.request_id,
        )

    def _prefill_job(self, prefill: RegisteredWorker, decode: RegisteredWorker | None) -> PrefillJob:
        return PrefillJob(
            handoff_id=self._handoff_id,
            prefill=prefill.life,
            decode=decode.partner() if decode else None,
            token_ids=self._token_ids,
            original_prompt_tokens=len(self._request.prompt),
            table_length=self._request.table_length,
            sampling=self._request.sampling,
            request_id=self._request.request_id,
        )


async def _finish(events: Stream[PrefillEvent]) -> None:
    """Lets the prefill worker end by itself. What fails there now no longer matters: its work is done."""
    try:
        async with asyncio.timeout(PREFILL_END_S):
            async for event in events:
                logger.warning("unexpected prefill event after the first token: %s", type(event).__name__)
    except TimeoutError:
        logger.warning("a prefill stream is cancelled that didn't end within %g s", PREFILL_END_S)
    except KvpactError as error:
        logger.info("prefill stream ended after its first token with: %s", error)
