"""Requests given up at any state: every block comes back, on both sides, time after time."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvpact.v1 import decode_pb2 as pb
from tests.fakes import make_tiny_model, prompt_of
from tests.handoff_faults import Fault, Script, Step
from tests.live_roles import LiveRoles, live_roles
from tests.references import golden

M = TypeVar("M")
T = TypeVar("T")
ROUNDS = 5
REQUESTS = 500
AT_ONCE = 32
SLOTS = 8
"""Prompts that the prefill worker runs at a time; the others queue."""
OUTPUT_TOKENS = 12
LATEST_MID = 6
LEAST_HITS = 10
"""In each round, of each state."""
SEED = 7
AFTERWARDS = 20


class State(IntEnum):
    """How far a request is, as its messages show it."""

    QUEUED = 0
    RESERVING = 1
    PREFILLING = 2
    TRANSFERRING = 3
    WAITING_FOR_ADMISSION = 4
    AFTER_FIRST_TOKEN = 5
    MID_DECODE = 6


@dataclass(slots=True)
class Watch(Script):
    """A road without a fault that notes how far each handoff is."""

    states: dict[bytes, State] = field(default_factory=dict)
    moved: dict[bytes, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    def note(self, handoff_id: bytes, state: State) -> None:
        """A handoff is this far now."""
        self.states[handoff_id] = state
        self.moved[handoff_id].set()

    async def call(
        self, step: Step | None, send: Callable[[M], Awaitable[T]], message: M, corrupt: Callable[[M], M]
    ) -> T:
        """Notes that Reserve is asked and that it was answered."""
        if step is not Step.RESERVE:
            return await send(message)
        assert isinstance(message, bytes)
        handoff_id = pb.ReserveRequest.FromString(message).terms.handoff_id
        self.note(handoff_id, State.RESERVING)
        answer = await send(message)
        self.note(handoff_id, State.PREFILLING)
        return answer

    async def parts(self, source: AsyncIterator[M], corrupt: Callable[[M], M]) -> AsyncGenerator[M, None]:
        """Notes each chunk and the commit."""
        handoff_id = b""
        async for message in source:
            assert isinstance(message, bytes)
            part = pb.PushRequest.FromString(message)
            match part.WhichOneof("part"):
                case "open":
                    handoff_id = part.open.handoff_id
                case "chunk":
                    self.note(handoff_id, State.TRANSFERRING)
                case "commit":
                    self.note(handoff_id, State.WAITING_FOR_ADMISSION)
            yield message


@dataclass(slots=True)
class Storm:
    """One round of requests, each given up at the state that it was dealt."""

    live: LiveRoles
    watch: Watch
    dice: np.random.Generator
    hits: Counter[State] = field(default_factory=Counter)

    async def run(self) -> None:
        """All requests, AT_ONCE at a time."""
        targets = [State(number % len(State)) for number in range(REQUESTS)]
        self.dice.shuffle(targets)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(target: State) -> None:
            async with places:
                await self._give_up_at(target)

        await asyncio.gather(*map(one, targets))

    async def _give_up_at(self, target: State) -> None:
        prompt = prompt_of(int(self.dice.integers(20, 64)), seed=int(self.dice.integers(1000)))
        least_tokens = int(self.dice.integers(2, LATEST_MID)) if target is State.MID_DECODE else 0
        late_by = int(self.dice.integers(4))
        tokens: list[int] = []
        asking = asyncio.create_task(self._ask(prompt, tokens))
        await asyncio.sleep(0)
        handoff_id = self.live.drawn[asking]
        asking.add_done_callback(lambda _: self.watch.moved[handoff_id].set())
        while self._state(handoff_id, tokens) < target or len(tokens) < least_tokens:
            await self.watch.moved[handoff_id].wait()
            self.watch.moved[handoff_id].clear()
            assert not asking.done(), asking
        for _ in range(late_by):
            await asyncio.sleep(0)
        self.hits[self._state(handoff_id, tokens)] += 1
        asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome

    async def _ask(self, prompt: tuple[int, ...], tokens: list[int]) -> None:
        request = self.live.request(prompt, OUTPUT_TOKENS)
        async with aclosing(self.live.lifecycle.run(request, lambda _: None)) as produced:
            async for item in produced:
                tokens.extend(item.token_ids)
                self.watch.moved[self.live.drawn[asyncio.current_task()]].set()

    def _state(self, handoff_id: bytes, tokens: list[int]) -> State:
        if tokens:
            return State.AFTER_FIRST_TOKEN if len(tokens) == 1 else State.MID_DECODE
        return self.watch.states.get(handoff_id, State.QUEUED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.timeout(240)
async def test_500_requests_given_up_at_any_state_leave_every_block_free_five_times_over(
    folder: Path,
) -> None:
    prompts = [prompt_of(20 + 3 * number, seed=99) for number in range(AFTERWARDS)]
    expected = [golden(folder, prompt, OUTPUT_TOKENS).token_ids for prompt in prompts]
    watch = Watch()
    async with live_roles(folder, script=watch, blocks=256, engine={"max_sequences": SLOTS}) as live:
        for number in range(ROUNDS):
            storm = Storm(live, watch, np.random.default_rng(SEED + number))
            await storm.run()
            await live.becomes_idle()
            assert min(storm.hits[state] for state in State) >= LEAST_HITS, storm.hits
            answers = await asyncio.gather(*(live.generate(prompt, OUTPUT_TOKENS) for prompt in prompts))
            assert answers == expected
            await live.becomes_idle()
            for kept in (watch.states, watch.moved, live.drawn):
                kept.clear()


async def test_one_reservation_that_nobody_gives_up_shows(folder: Path) -> None:
    async with live_roles(folder, script=(script := Script())) as live:
        script.step, script.fault = Step.OPEN, Fault.STALLED
        asking = asyncio.create_task(live.generate(prompt_of(40), OUTPUT_TOKENS))
        await script.reached.wait()
        assert not live.idle()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await live.becomes_idle()
