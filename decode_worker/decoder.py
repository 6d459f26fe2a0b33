"""Output tokens: of committed handoffs, and of prompts that this worker computes itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from kvpact.engine.engine import Engine
from kvpact.engine.requests import SequenceFailed, SequenceRequest, TokenComputed
from kvpact.engine.stream import EventQueue, stream
from kvpact.errors import BadRequest, Exhausted, Fenced, Unavailable
from kvpact.handoff.chunks import block_count
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.jobs import DecodedTokens, DecodeJob, GenerateJob
from kvpact.handoff.receiver import Receiver, Taken
from kvpact.types import HandoffId, WorkerLife

LIMITS = ReceiverLimits()


class Decoder:
    """Takes blocks over from the receiver and gives them to the engine, which frees them on every path."""

    def __init__(self, engine: Engine, receiver: Receiver, life: WorkerLife) -> None:
        self._engine = engine
        self._receiver = receiver
        self._life = life
        self._draining = False
        self._queues: dict[HandoffId, EventQueue] = {}

    async def decode(self, job: DecodeJob) -> AsyncGenerator[DecodedTokens, None]:
        """Tokens after the first one. Leaving the generator early cancels the sequence.

        Raises:
            UnknownHandoff: not committed here, or ended.
            Fenced: another life of this worker is meant, or the handoff was taken before.
            BadRequest: the tokens aren't those of the handoff.
            Unavailable: the handoff was released while it was decoded.
        """
        async with contextlib.aclosing(self.tokens(job)) as tokens:
            async for token in tokens:
                yield DecodedTokens(token_ids=(token.token_id,), finish_reason=token.finish_reason)

    async def tokens(self, job: DecodeJob, **options: Any) -> AsyncGenerator[TokenComputed, None]:
        """The engine's own events of the same job; `options` are fields of SequenceRequest to set."""
        queue: EventQueue = asyncio.Queue()
        request = dataclasses.replace(self._take(job), **options)
        self._queues[job.handoff_id] = queue
        try:
            async with contextlib.aclosing(stream(self._engine, request, queue)) as events:
                async for event in events:
                    if isinstance(event, SequenceFailed):
                        raise event.error
                    if isinstance(event, TokenComputed):
                        yield event
                        if event.finish_reason is not None:
                            return
            raise Unavailable(f"handoff {job.handoff_id.hex()} was released")
        finally:
            del self._queues[job.handoff_id]

    async def generate(self, job: GenerateJob) -> AsyncGenerator[DecodedTokens, None]:
        """All tokens of a prompt that was not handed over. Leaving the generator early cancels the sequence.

        Raises:
            Fenced: another life of this worker is meant.
            BadRequest: tokens, lengths or sampling can't be served; nothing was computed.
            Exhausted: too few blocks are free for the prompt now.
            Unavailable: the worker drains, or its engine ended.
        """
        self._check_alone(job)
        request = SequenceRequest(
            token_ids=job.token_ids,
            sampling=job.sampling,
            table_length=job.table_length,
            output_tokens_so_far=len(job.token_ids) - job.original_prompt_tokens,
        )
        async with contextlib.aclosing(stream(self._engine, request)) as events:
            async for event in events:
                if isinstance(event, SequenceFailed):
                    raise event.error
                if isinstance(event, TokenComputed):
                    yield DecodedTokens(token_ids=(event.token_id,), finish_reason=event.finish_reason)

    def drain(self) -> None:
        """Computes no new prompts; what runs goes on, and so does what was handed over."""
        self._draining = True

    def give_up(self, handoff_id: HandoffId) -> bool:
        """Ends decoding of a handoff; whether it ran."""
        queue = self._queues.get(handoff_id)
        if queue is not None:
            queue.put_nowait(None)
        return queue is not None

    def _check_alone(self, job: GenerateJob) -> None:
        if job.decode != self._life:
            raise Fenced(
                f"decode worker {self._life.worker} runs another life than the one that is meant",
                expected=self._life.incarnation.hex(),
                found=job.decode.incarnation.hex(),
            )
        if self._draining:
            raise Unavailable(f"decode worker {self._life.worker} is draining")
        tokens, context = len(job.token_ids), self._engine.contract.model.context_tokens
        if not tokens <= job.table_length <= context:
            raise BadRequest(
                f"table_length_tokens is {job.table_length}; expected [{tokens}, {context}]",
                param="table_length_tokens",
            )
        if not 1 <= job.original_prompt_tokens <= tokens:
            raise BadRequest(
                f"original_prompt_tokens is {job.original_prompt_tokens}; expected [1, {tokens}]",
                param="original_prompt_tokens",
            )
        self._check_room(tokens)

    def _check_room(self, prompt_tokens: int) -> None:
        """Turns away what would wait for blocks, as Reserve does; what never fits the engine refuses."""
        needed = block_count(prompt_tokens, self._engine.contract.layout.block_size)
        counts = self._engine.pool.counts()
        watermark = min(LIMITS.growth_watermark_blocks, counts.total - needed)
        if needed <= counts.total and counts.free - needed < watermark:
            raise Exhausted(
                f"the prompt takes {needed} blocks; {counts.free} of {counts.total} are free, "
                f"{watermark} stay so",
                retry_after_s=LIMITS.retry_after_s,
            )

    def _take(self, job: DecodeJob) -> SequenceRequest:
        if len(job.token_ids) <= job.original_prompt_tokens:
            raise BadRequest("token_ids lack an output token behind the original prompt", param="token_ids")
        taken = self._receiver.take(job.handoff_id, job.decode, job.token_ids)
        return SequenceRequest(
            token_ids=job.token_ids,
            sampling=job.sampling,
            table_length=taken.table_length,
            output_tokens_so_far=len(job.token_ids) - job.original_prompt_tokens,
            positions=_positions(taken, len(job.token_ids)),
            blocks=taken.blocks,
            computed_tokens=len(taken.token_ids),
        )


def _positions(taken: Taken, tokens: int) -> tuple[int, ...] | None:
    """Position of each of `tokens` tokens; None where they stand from 0 without gaps."""
    if taken.next_position == len(taken.token_ids):
        return None
    following = range(taken.next_position, taken.next_position + tokens - len(taken.token_ids))
    return (*taken.positions, *following)
