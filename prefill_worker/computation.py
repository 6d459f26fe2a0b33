"""One prompt in the engine: follows its events, lets the sender read its blocks, gives them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import torch

from kvpact.engine.engine import Engine
from kvpact.engine.requests import (
    ChunkComputed,
    PrefixReused,
    SequenceFailed,
    SequenceRequest,
    TokenComputed,
    WitnessesComputed,
    WitnessRow,
)
from kvpact.engine.stream import stream
from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff.finishing import finished
from kvpact.handoff.jobs import FirstToken
from kvpact.handoff.messages import Buffer, Witness
from kvpact.handoff.outgoing import Shown
from kvpact.handoff.sending import SendingHandoff, Sent
from kvpact.types import BlockId, HandoffId, SequenceId

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Computation:
    """One prompt in the engine. Its blocks are read by the sender and given back on leaving."""

    def __init__(
        self,
        engine: Engine,
        handoff_id: HandoffId,
        request: SequenceRequest,
        released: asyncio.Event | None = None,
    ) -> None:
        """`released`: ends the computation as Unavailable when it is set, at whatever state."""
        self._engine = engine
        self._handoff_id = handoff_id
        self._released = released or asyncio.Event()
        self._request = request
        self._witnesses: tuple[WitnessRow, ...] = ()
        self._computed: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[TokenComputed] = loop.create_future()
        self._to_commit: asyncio.Future[int] = loop.create_future()
        """The first token, if the sequence goes on after it."""
        self._first_computed = 0
        self._blocks: tuple[BlockId, ...] = ()
        self._sequence_id: SequenceId | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Computation:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._watch_release())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await finished(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            for outcome in (self._first, self._to_commit):
                if not outcome.cancel() and not outcome.cancelled():
                    outcome.exception()
            if self._sequence_id is not None:
                self._engine.release(self._sequence_id)

    async def first_token(self) -> FirstToken:
        """Awaits the first output token. Raises what the engine failed with."""
        token = await self._first
        return FirstToken(token_id=token.token_id, finish_reason=token.finish_reason)

    async def send(self, handoff: SendingHandoff) -> tuple[FirstToken, Sent | None]:
        """Sends blocks as they are computed, then commits; no commit if the first token ends the sequence."""
        sending = asyncio.ensure_future(handoff.send(self._progress(), self, self._to_commit, self._shown))
        either: list[asyncio.Future[Any]] = [sending, self._first]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            first = await self.first_token()
            if first.finish_reason is not None:
                return first, None
            sent = await self._unless_released(sending)
        finally:
            sending.cancel()
            await finished(asyncio.gather(sending, return_exceptions=True))
        return first, sent

    async def _unless_released(self, sending: asyncio.Future[T]) -> T:
        """What `sending` gives; the release comes first where both happened."""
        either: list[asyncio.Future[Any]] = [sending, self._tasks[1]]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._released.is_set() and not sending.done():
            raise self._was_released()
        return await sending

    async def _watch_release(self) -> None:
        await self._released.wait()
        self.fail(self._was_released())

    def _was_released(self) -> Unavailable:
        return Unavailable(f"handoff {self._handoff_id.hex()} was released")

    def fail(self, error: KvpactError) -> None:
        """Ends the computation with `error`, unless the first token is there."""
        if not self._first.done():
            self._first.set_exception(error)
            self._computed.put_nowait(None)

    async def _follow(self) -> None:
        """Turns the engine's events into progress and the first token."""
        try:
            async with contextlib.aclosing(stream(self._engine, self._request)) as events:
                async for event in events:
                    self._sequence_id = event.sequence_id
                    match event:
                        case PrefixReused():
                            self._blocks, self._first_computed = event.blocks, event.computed_tokens
                            self._computed.put_nowait(event.computed_tokens)
                        case ChunkComputed():
                            self._blocks = event.blocks
                            self._computed.put_nowait(event.computed_tokens)
                        case WitnessesComputed():
                            self._witnesses = event.rows
                        case TokenComputed():
                            self._settle(event)
                        case SequenceFailed():
                            raise event.error
        except KvpactError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("following a computation failed")
            self.fail(KvpactError(f"following a computation failed: {type(error).__name__}"))

    def _settle(self, token: TokenComputed) -> None:
        if self._first.done():
            return
        self._first.set_result(token)
        if token.finish_reason is None:
            self._to_commit.set_result(token.token_id)

    async def _progress(self) -> AsyncIterator[int]:
        """Prompt tokens computed so far; ends early, by raising it, with what the engine failed with."""
        while (computed := await self._computed.get()) is not None:
            yield computed
        await self._first

    def _shown(self) -> Shown:
        positions = self._request.positions
        rows = tuple(
            Witness(
                layer=row.place.layer,
                position=row.place.token if positions is None else positions[row.place.token],
                raw_key=row.raw_key_HD.numpy().tobytes(),
                attended_key=row.attended_key_HD.numpy().tobytes(),
                value=row.value_HD.numpy().tobytes(),
            )
            for row in self._witnesses
        )
        return Shown(rows=rows, first_computed_tokens=self._first_computed)

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """See BlockReader."""
        return self._read(layer, blocks)

    def lends(self, layer: int, blocks: range) -> bool:
        """See BlockReader."""
        return self._engine.cache.lends(self._chosen(blocks))

    def into(self, layer: int, blocks: range, keys: memoryview, values: memoryview) -> None:
        """See BlockReader."""
        self._engine.cache.read_blocks_into(layer, self._chosen(blocks), keys, values)

    def _read(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        return self._engine.cache.read_blocks(layer, self._chosen(blocks))

    def _chosen(self, blocks: range) -> torch.Tensor:
        return torch.tensor(self._blocks[blocks.start : blocks.stop], dtype=torch.int64)
