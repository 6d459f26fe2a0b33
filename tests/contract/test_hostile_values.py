"""Values that decode and are lies: receiver and sender refuse them before anything is allocated for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from kvpact.errors import BadRequest, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.messages import (
    CommitReceipt,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    PushPart,
    RequiredPositions,
    Reservation,
)
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.regions import ShmSegment
from kvpact.handoff.shm_segment import ForeignSegment
from kvpact.types import PositionRun
from kvpact.v1 import decode_pb2
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    all_parts,
    first_token,
    in_process_wire,
    make_handoff_id,
    progress,
)
from tests.hostile import field_mutations
from tests.rpc_samples import RPCS

DEADLINE_S = 20.0


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with in_process_wire() as made:
        await made.sender().pair(READER)
        yield made
        assert made.reader.all_free()


LIES: dict[str, Callable[[HandoffTerms], HandoffTerms]] = {
    "a prompt longer than the context": lambda terms: replace(terms, token_ids=tuple(range(200_000))),
    "a run of 2^31 - 1 tokens": lambda terms: replace(
        terms, positions=(PositionRun(start=0, count=2**31 - 1),)
    ),
    "a run at the end of all numbers": lambda terms: replace(
        terms, positions=(PositionRun(start=2**31 - 1, count=len(terms.token_ids)),)
    ),
    "a table for 2^31 - 1 tokens": lambda terms: replace(terms, table_length=2**31 - 1),
    "a next token beyond the context": lambda terms: replace(terms, next_position=2**31 - 1),
    "groups by the thousand": lambda terms: replace(terms, tables=terms.tables * 5_000),
    "required ranges by the thousand": lambda terms: replace(terms, required=terms.required * 5_000),
    "a required range of no group": lambda terms: replace(
        terms, required=(*terms.required, RequiredPositions(group=7, start=0, end=1))
    ),
    "a required range beyond the prompt": lambda terms: replace(
        terms, required=(RequiredPositions(group=0, start=0, end=2**31 - 1),)
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_terms_that_lie_get_no_block(wire: Wire, lie: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await wire.port.reserve(LIES[lie](wire.terms()), MAX_OUTPUT_TOKENS)
    assert len(str(refused.value)) < 300
    assert wire.reader.all_free()


async def test_mutated_terms_are_granted_or_refused(wire: Wire) -> None:
    outcomes: Counter[str] = Counter()
    for number, label in enumerate(labels_of(codec.encode_reserve(wire.terms(), MAX_OUTPUT_TOKENS)), start=1):
        message = codec.encode_reserve(wire.terms(number=number), MAX_OUTPUT_TOKENS)
        try:
            terms, tokens = codec.decode_reserve(mutated(message, label))
            await wire.port.reserve(terms, tokens)
        except KvpactError as error:
            outcomes[type(error).__name__] += 1
            assert wire.reader.all_free(), label
        else:
            outcomes["granted"] += 1
            await wire.port.release(terms.handoff_id, "the test is done")
    assert set(outcomes) == {"BadRequest", "ContractRefused", "Fenced", "granted"}


@pytest.mark.parametrize("place", [0, 1, -1], ids=["open", "chunk", "commit"])
async def test_a_push_with_a_mutated_part_ends_with_every_block_free(wire: Wire, place: int) -> None:
    sample = await all_parts(wire, wire.terms(number=9_999))
    await wire.port.release(make_handoff_id(9_999), "only a sample")
    outcomes: Counter[str] = Counter()
    for number, label in enumerate(labels_of(as_message(sample[place])), start=1):
        parts = await all_parts(wire, wire.terms(number=number))
        hostile = mutated(as_message(parts[place]), label).SerializeToString()
        outcomes[await pushed(wire, parts, place, hostile)] += 1
        await wire.port.release(make_handoff_id(number), "the test is done")
        async with asyncio.timeout(DEADLINE_S):
            await wire.reader.emptied()
    assert outcomes["BadRequest"]
    assert set(outcomes) <= {"BadRequest", "DataLoss", "Fenced", "UnknownHandoff", "committed"}


async def pushed(wire: Wire, parts: list[PushPart], place: int, hostile: bytes) -> str:
    """How a push went one of whose parts is hostile bytes."""

    async def stream() -> AsyncIterator[PushPart]:
        for index, part in enumerate(parts):
            yield codec.push_from_bytes(hostile) if index == place % len(parts) else part

    try:
        async with asyncio.timeout(DEADLINE_S):
            await wire.port.push(stream())
    except KvpactError as error:
        return type(error).__name__
    return "committed"


def as_message(part: PushPart) -> decode_pb2.PushRequest:
    return decode_pb2.PushRequest.FromString(codec.push_to_bytes(part))


def labels_of(message: Message) -> list[str]:
    return [label for label, _ in field_mutations(message)]


def mutated(message: Any, label: str) -> Any:
    """The message with the change of that label; as it is where it has no such place."""
    return type(message).FromString(dict(field_mutations(message)).get(label, message.SerializeToString()))


class LyingPort:
    """A reader whose answers to one call are changed on their way."""

    def __init__(self, port: ReaderPort, what: str) -> None:
        self._port = port
        self._what = what
        self.label = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    async def pair(self, offer: PairOffer) -> PairAnswer:
        """See ReaderPort."""
        return self._lie("pair", codec.encode_answer(await self._port.pair(offer)), codec.decode_answer)

    async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
        """See ReaderPort."""
        granted = await self._port.reserve(terms, max_output_tokens)
        return self._lie("reserve", codec.encode_reservation(granted), codec.decode_reservation)

    async def push(self, parts: AsyncIterator[PushPart]) -> CommitReceipt:
        """See ReaderPort."""
        return self._lie("push", codec.encode_receipt(await self._port.push(parts)), codec.decode_receipt)

    def _lie(self, what: str, message: Any, decode: Callable[[Any], Any]) -> Any:
        return decode(mutated(message, self.label) if what == self._what else message)


SAMPLES = {
    "pair": RPCS["DecodeService.Pair response"],
    "reserve": RPCS["DecodeService.Reserve response"].reservation,
    "push": RPCS["DecodeService.Push response"],
}


@pytest.mark.parametrize("what", SAMPLES)
async def test_a_sender_survives_a_reader_that_lies(wire: Wire, what: str) -> None:
    lying = LyingPort(wire.port, what)
    sender = wire.sender(port=lying)  # type: ignore[arg-type]
    await wire.sender().pair(READER)
    outcomes: Counter[str] = Counter()
    for number, label in enumerate(labels_of(SAMPLES[what])[::3], start=1):
        lying.label = label
        terms = wire.terms(number=number)
        try:
            async with asyncio.timeout(DEADLINE_S):
                if what == "pair":
                    await sender.pair(READER)
                cache = FakeCache(wire.contract)
                await sender.hand_over(terms, MAX_OUTPUT_TOKENS, progress(40), cache, first_token())
        except KvpactError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["sent"] += 1
        await wire.port.release(terms.handoff_id, "the test is done")
        assert wire.reader.all_free(), label
    assert outcomes["sent"]
    assert outcomes["BadRequest"]


@pytest.mark.parametrize("held", [5, 40, 48, 2**31 - 1])
async def test_a_reader_that_says_it_holds_what_it_cannot_is_not_believed(wire: Wire, held: int) -> None:
    class Boasting(LyingPort):
        async def reserve(self, terms: HandoffTerms, max_output_tokens: int) -> Reservation:
            granted = await super().reserve(terms, max_output_tokens)
            return replace(granted, held_prefix_tokens=held)

    sender = wire.sender(port=Boasting(wire.port, ""))  # type: ignore[arg-type]
    with pytest.raises(KvpactError, match="expected whole blocks"):
        await sender.hand_over(
            wire.terms(), MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
        )
    assert wire.reader.all_free(), "what was granted is released"


@pytest.mark.parametrize(
    "told",
    [
        ShmSegment(pid=1, fd=0, size_bytes=4096, token=b"t" * 16),
        ShmSegment(pid=2**31 - 1, fd=2**31 - 1, size_bytes=4096, token=b"t" * 16),
        ShmSegment(pid=1, fd=1, size_bytes=2**63 - 1, token=b"t" * 16),
    ],
)
async def test_a_segment_of_another_process_is_not_mapped(told: ShmSegment) -> None:
    with pytest.raises((BadRequest, Unavailable)):
        ForeignSegment(told)


async def test_a_release_keeps_a_short_reason(wire: Wire) -> None:
    reason = codec.decode_reason("x" * (3 << 20) + "\n")
    await wire.port.release(make_handoff_id(5), reason)
    stone = wire.reader.receiver._table.tombstone(make_handoff_id(5))
    assert stone is not None
    assert len(stone.reason) < 400
