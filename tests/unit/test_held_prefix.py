"""What a reader holds of a prompt isn't sent again; what it can't vouch for, or lacks a part of, is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest, DataLoss, Exhausted
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.messages import Chunk, Commit, HandoffTerms, PushPart, Reservation
from kvpact.handoff.sender import Sent
from kvpact.handoff.terms import digest_tokens
from kvpact.types import LayerKind
from tests.factories import make_contract, make_group
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    WIRES,
    WRITER,
    FakeCache,
    Wire,
    all_parts,
    first_token,
    in_process_wire,
    make_reader,
    progress,
    stream,
)
from tests.unit.test_content_identity import two_tables

LIMITS = ReceiverLimits(growth_watermark_blocks=0)


async def wire_of(
    writer: Contract | None = None, reader: Contract | None = None, *, blocks: int = 64, watermark: int = 0
) -> AsyncIterator[Wire]:
    limits = replace(LIMITS, growth_watermark_blocks=watermark)
    made = make_reader(contract=reader, blocks=blocks, limits=limits)
    async with in_process_wire(contract=writer, reader=made) as wire:
        await wire.sender().pair(READER)
        yield wire
        made.receiver.close()
        assert made.pool.held() == {}


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async for made in wire_of():
        yield made


async def hand_over(wire: Wire, terms: HandoffTerms) -> Sent:
    computed, cache = progress(len(terms.token_ids)), FakeCache(wire.contract)
    return await wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, computed, cache, first_token())


async def reserved(wire: Wire, terms: HandoffTerms) -> Reservation:
    return await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)


async def held(wire: Wire, terms: HandoffTerms) -> int:
    """Tokens that a reservation, given up at once, finds."""
    reservation = await reserved(wire, terms)
    await wire.port.release(terms.handoff_id, "looked up")
    return reservation.held_prefix_tokens


def other_tokens(terms: HandoffTerms, at: int) -> HandoffTerms:
    """Another token at `at`."""
    tokens = (*terms.token_ids[:at], 99, *terms.token_ids[at + 1 :])
    return replace(terms, token_ids=tokens, token_digest=digest_tokens(tokens))


@pytest.mark.parametrize(
    ("writer_size", "reader_size", "tokens", "expected"),
    [
        (16, 16, 40, 32),
        (16, 16, 32, 16),
        (16, 16, 33, 32),
        (16, 16, 16, 0),
        (16, 32, 70, 64),
        (16, 32, 64, 32),
        (32, 16, 70, 64),
        (32, 16, 60, 32),
        (16, 24, 97, 96),
        (16, 24, 96, 48),
    ],
)
async def test_a_prefix_is_held_in_whole_blocks_of_both_sides_and_the_last_block_always_comes(
    writer_size: int, reader_size: int, tokens: int, expected: int
) -> None:
    contracts = make_contract(block_size=writer_size), make_contract(block_size=reader_size)
    async for wire in wire_of(*contracts):
        whole = await hand_over(wire, wire.terms(prompt_tokens=tokens))
        terms = wire.terms(prompt_tokens=tokens, number=2)
        again = await hand_over(wire, terms)
        assert wire.reader.receiver.counters().prefix_hit_tokens == expected
        token_bytes = 2 * 2 * 2 * 16 * 4
        assert whole.payload_bytes - again.payload_bytes == expected * token_bytes
        landed = {block for number, _, block in wire.reader.landing.landed if number == terms.handoff_id}
        assert min(landed) == expected // writer_size


async def test_the_first_blocks_are_shared_and_go_back_when_both_let_go(wire: Wire) -> None:
    await hand_over(wire, wire.terms())
    await reserved(wire, wire.terms(number=2))
    blocks = wire.reader.landing.blocks
    assert wire.reader.pool.held() == {"handoff": 4}
    taken = wire.reader.receiver.take(wire.terms().handoff_id, READER, (*range(40), 7))
    assert wire.reader.pool.held() == {"sequence": 3, "handoff": 3}
    assert taken.blocks == blocks[wire.terms().handoff_id]
    wire.reader.pool.free(taken.blocks, "sequence")
    assert wire.reader.pool.held() == {"handoff": 3}
    wire.reader.alarms.advance(31.0)
    assert wire.reader.pool.counts().free == 64
    assert await held(wire, wire.terms(number=3)) == 32


@pytest.mark.parametrize(("at", "expected"), [(0, 0), (15, 0), (16, 16), (31, 16), (32, 32)])
async def test_a_prefix_ends_before_the_block_of_the_first_other_token(
    wire: Wire, at: int, expected: int
) -> None:
    await hand_over(wire, wire.terms())
    assert await held(wire, other_tokens(wire.terms(number=2), at)) == expected


async def test_a_handoff_that_isn_t_committed_leaves_nothing_to_reuse(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    damaged = [part for part in parts if not isinstance(part, Commit)]
    with pytest.raises(DataLoss, match="without commit"):
        await wire.port.push(stream(damaged))
    assert await held(wire, wire.terms(number=2)) == 0


async def test_another_table_at_another_length_is_another_content() -> None:
    contract = two_tables(make_contract())
    async for wire in wire_of(contract, contract):
        await hand_over(wire, wire.terms(table_length=60))
        assert await held(wire, wire.terms(number=2, table_length=64)) == 32
        assert await held(wire, wire.terms(number=3, table_length=65)) == 0


async def test_layers_whose_window_left_blocks_with_the_writer_hold_only_what_came() -> None:
    groups = (
        make_group(layers=(0,)),
        make_group(layers=(1,), kind=LayerKind.SLIDING, window=20),
    )
    contract = make_contract(layer_groups=groups)
    async for wire in wire_of(contract, contract):
        await hand_over(wire, wire.terms(prompt_tokens=97))
        for number, (tokens, expected) in enumerate([(117, 96), (84, 80), (70, 48), (60, 32)], start=2):
            assert await held(wire, wire.terms(prompt_tokens=tokens, number=number)) == expected


async def test_nothing_may_land_in_the_held_prefix(wire: Wire) -> None:
    whole = await all_parts(wire, wire.terms())
    await wire.port.push(stream(whole))
    terms = wire.terms(number=2)
    reservation = await reserved(wire, terms)
    assert reservation.held_prefix_tokens == 32
    opened = replace(whole[0], handoff_id=terms.handoff_id, generation=reservation.generation)

    def foreign(part: PushPart) -> PushPart:
        assert isinstance(part, Chunk)
        header = replace(part.header, handoff_id=terms.handoff_id, generation=reservation.generation)
        return replace(part, header=header)

    with pytest.raises(BadRequest, match="the reader holds those before block 2"):
        await wire.port.push(stream([opened, foreign(whole[1])]))
    assert {number for number, _, _ in wire.reader.landing.landed} == {wire.terms().handoff_id}


@pytest.mark.parametrize("told", [33, 48, 40, 8, 31])
async def test_a_writer_that_computed_less_than_whole_blocks_and_its_last_one_is_refused(
    wire: Wire, told: int
) -> None:
    parts = await all_parts(wire, wire.terms())
    last = parts[-1]
    assert isinstance(last, Commit)
    with pytest.raises(BadRequest, match=f"first_computed_tokens is {told}; at most 32 tokens"):
        await wire.port.push(stream([*parts[:-1], replace(last, first_computed_tokens=told)]))


async def test_a_pinned_prefix_is_counted_once_when_room_is_short() -> None:
    async for wire in wire_of(blocks=5, watermark=1):
        await hand_over(wire, wire.terms())
        await reserved(wire, wire.terms(number=2))
        assert wire.reader.pool.counts().free == 1
        with pytest.raises(Exhausted, match="1 KV blocks wanted for handoff, 1 of 5 are free, 1 stay so"):
            await reserved(wire, wire.terms(number=3))
        assert wire.reader.pool.counts().free == 1


async def test_a_probe_neither_takes_nor_leaves_blocks(wire: Wire) -> None:
    await hand_over(wire, wire.terms())
    counters = wire.reader.receiver.counters()
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (40, 0)
    assert wire.reader.receiver._grants._names(replace(wire.terms(number=2), canary=True), None) == ()  # type: ignore[arg-type]


async def test_a_doubtful_writer_s_blocks_are_forgotten_and_another_s_stay(wire: Wire) -> None:
    await hand_over(wire, wire.terms())
    other = replace(WRITER, worker="prefill-1", incarnation=b"o" * 16)
    await wire.sender(life=other).pair(READER)
    theirs = replace(other_tokens(wire.terms(number=2), 0), writer=other)
    await hand_over(wire, theirs)
    parts = await all_parts(wire, wire.terms(number=3))
    chunk = next(part for part in parts if isinstance(part, Chunk))
    with pytest.raises(DataLoss, match="checksum"):
        await wire.port.push(stream([parts[0], replace(chunk, checksum=chunk.checksum ^ 1)]))
    assert await held(wire, wire.terms(number=4)) == 0
    assert await held(wire, replace(other_tokens(wire.terms(number=5), 0), writer=other)) == 32


async def test_a_reader_that_doesn_t_reuse_asks_for_everything() -> None:
    reader = make_reader(limits=replace(LIMITS, reuse_prefixes=False))
    async with in_process_wire(reader=reader) as wire:
        await wire.sender().pair(READER)
        for number in (1, 2):
            await hand_over(wire, wire.terms(number=number))
        assert reader.receiver.counters().prefix_query_tokens == 0
        assert reader.pool.counts().cached == 0


@pytest.mark.parametrize("kind", WIRES)
async def test_over_every_transport_only_what_isn_t_held_travels(kind: str) -> None:
    contract = make_contract(block_size=16)
    async with WIRES[kind](contract=contract, reader=make_reader(limits=LIMITS)) as wire:
        await wire.sender().pair(READER)
        parts = await all_parts(wire, wire.terms(prompt_tokens=100))
        await wire.port.push(stream(parts))
        terms = wire.terms(prompt_tokens=100, number=2)
        again = await all_parts(wire, terms)
        last = again[-1]
        assert isinstance(last, Commit)
        assert {part.header.block_start for part in again if isinstance(part, Chunk)} == {6}
        await wire.port.push(stream([*again[:-1], replace(last, first_computed_tokens=96)]))
        wire.reader.receiver.take(terms.handoff_id, READER, (*range(100), FIRST_TOKEN_ID))
        landed = {block for number, _, block in wire.reader.landing.landed if number == terms.handoff_id}
        assert landed == {6}
