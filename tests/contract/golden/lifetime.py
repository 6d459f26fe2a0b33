"""Plays one lifetime of the corpus to a reader over a wire and holds each answer to its expectation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from coordinator.grpc_transport import GrpcTransport
from kvpact.contract.identity import contract_digest
from kvpact.errors import KvpactError
from kvpact.handoff.codec import contract_to_bytes
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.jobs import DecodedTokens, DecodeJob
from kvpact.handoff.messages import Chunk, CommitReceipt, HandoffTerms, PairOffer, PushPart
from kvpact.types import Sampling, WorkerLife
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    WRITER,
    FakeDecoder,
    Wire,
    all_parts,
    make_handoff_id,
    stream,
)

SECOND_WRITER = WorkerLife(worker=WRITER.worker, incarnation=b"x" * 16)
OTHER_READER = WorkerLife(worker=READER.worker, incarnation=b"q" * 16)
Step = Mapping[str, Any]
Facts = dict[str, Any]


class RunningPush:
    """A push that was begun: its first chunk landed, the rest waits."""

    def __init__(self, wire: Wire, parts: list[PushPart]) -> None:
        self._rest = asyncio.Event()
        self._parts = parts
        self._landing = wire.reader.landing
        self._task = asyncio.ensure_future(wire.port.push(self._told()))

    async def landed(self) -> None:
        """Returns once the first chunk lies there."""
        chunk = self._parts[1]
        assert isinstance(chunk, Chunk)
        place = (chunk.header.handoff_id, chunk.header.layer, chunk.header.block_start)
        async with asyncio.timeout(10):
            while place not in self._landing.landed:  # noqa: ASYNC110  a thread lands it
                await asyncio.sleep(0)

    async def end(self) -> CommitReceipt:
        """Sends the rest."""
        self._rest.set()
        return await self._task

    async def break_off(self) -> None:
        """Ends it as a writer that dies does."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _told(self) -> AsyncGenerator[PushPart, None]:
        for index, part in enumerate(self._parts):
            if index == 2:
                await self._rest.wait()
            yield part


class Player:
    """Takes the steps of one lifetime in order."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._terms: dict[int, HandoffTerms] = {}
        self._parts: dict[int, list[PushPart]] = {}
        self._running: dict[int, RunningPush] = {}

    async def play(self, steps: list[Step]) -> None:
        """Fails at the first step whose answer isn't what it expects."""
        try:
            await self._play(steps)
        finally:
            for running in self._running.values():
                await running.break_off()

    async def _play(self, steps: list[Step]) -> None:
        for index, step in enumerate(steps):
            do: Callable[[Step], Awaitable[Facts]] = getattr(self, f"_{step['do']}")
            expected = step.get("expect", {})
            try:
                found = await do(step)
            except KvpactError as error:
                found = {"reason": error.reason, "message": str(error)} | error.metadata()
            where = f"step {index}, {step['do']}: expected {expected}, found {found}"
            assert ("reason" in found) == ("reason" in expected), where
            for name, value in expected.items():
                held = value in found[name] if name == "message" else found.get(name) == value
                assert name in found, where
                assert held, where

    async def _pair(self, step: Step) -> Facts:
        contract = self._wire.contract
        offer = PairOffer(
            schema_major=contract.schema.major,
            contract_digest=contract_digest(contract),
            writer=_writer(step),
            reader=_reader(step),
            contract=contract_to_bytes(contract),
        )
        return {"verdict": (await self._wire.port.pair(offer)).verdict.word.value}

    async def _reserve(self, step: Step) -> Facts:
        number = step["handoff"]
        terms = self._wire.terms(number=number, prompt_tokens=step.get("prompt_tokens", 40))
        terms = replace(terms, writer=_writer(step), reader=_reader(step))
        asked = step.get("max_output_tokens", MAX_OUTPUT_TOKENS)
        reservation = await self._wire.port.reserve(terms, asked)
        if number not in self._parts:
            self._terms[number] = terms
            self._parts[number] = await all_parts(self._wire, terms)
        return {"generation": reservation.generation, "lease_s": reservation.lease_s}

    async def _renew(self, step: Step) -> Facts:
        return {"lease_s": await self._wire.port.renew(make_handoff_id(step["handoff"]), _reader(step))}

    async def _release(self, step: Step) -> Facts:
        state = await self._wire.port.release(make_handoff_id(step["handoff"]), "given up")
        return {"previous_state": None if state is None else state.value}

    async def _push(self, step: Step) -> Facts:
        parts = list(self._parts[step["handoff"]])
        if step.get("flip_byte"):
            chunk = parts[1]
            assert isinstance(chunk, Chunk)
            parts[1] = replace(chunk, keys=bytes([bytes(chunk.keys)[0] ^ 1]) + bytes(chunk.keys)[1:])
        return _receipt(await self._wire.port.push(stream(parts)))

    async def _push_begin(self, step: Step) -> Facts:
        running = RunningPush(self._wire, self._parts[step["handoff"]])
        self._running[step["handoff"]] = running
        await running.landed()
        return {}

    async def _push_end(self, step: Step) -> Facts:
        return _receipt(await self._running.pop(step["handoff"]).end())

    async def _decode(self, step: Step) -> Facts:
        number = step["handoff"]
        terms = self._terms.get(number) or self._wire.terms(number=number)
        first = FIRST_TOKEN_ID + 1 if step.get("other_tokens") else FIRST_TOKEN_ID
        job = DecodeJob(
            handoff_id=make_handoff_id(number),
            decode=_reader(step),
            token_ids=(*terms.token_ids, first),
            sampling=Sampling(max_output_tokens=MAX_OUTPUT_TOKENS),
            original_prompt_tokens=len(terms.token_ids),
            request_id="golden",
        )
        return {"token_ids": [token async for item in self._decoded(job) for token in item.token_ids]}

    async def _decoded(self, job: DecodeJob) -> AsyncGenerator[DecodedTokens, None]:
        reader, port = self._wire.reader, self._wire.port
        if not isinstance(port, GrpcReaderPort):
            async with aclosing(FakeDecoder(reader.receiver, reader.pool).decode(job)) as items:
                async for item in items:
                    yield item
            return
        remote = GrpcTransport().decode_port(port.endpoint)
        try:
            async for item in remote.decode(job):
                yield item
        finally:
            await remote.close()

    async def _drain(self, step: Step) -> Facts:
        return {"running_requests": await self._wire.reader.drain()}

    async def _advance(self, step: Step) -> Facts:
        self._wire.reader.alarms.advance(step["seconds"])
        return {}

    async def _state(self, step: Step) -> Facts:
        """Once nothing is held any more where that is expected: a running landing frees its blocks late."""
        reader = self._wire.reader
        if step["expect"]["handoffs"] == 0:
            async with asyncio.timeout(10):
                await reader.emptied()
        counters = reader.receiver.counters()
        return {
            "handoffs": reader.receiver.held(),
            "free_blocks": reader.pool.counts().free,
            "committed": counters.committed,
            "failed": counters.failed,
            "expired": counters.expired,
        }


def _writer(step: Step) -> WorkerLife:
    return SECOND_WRITER if step.get("writer_life") == "second" else WRITER


def _reader(step: Step) -> WorkerLife:
    return OTHER_READER if step.get("reader_life") == "other" else READER


def _receipt(receipt: CommitReceipt) -> Facts:
    return {"exactness": receipt.exactness.value}
