"""What holds for every handoff: messages come back as they went, each block has one owner."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.contract.contract import Contract, RotaryTable, Shard
from kvpact.errors import BadRequest, ContractRefused, DataLoss, KvpactError
from kvpact.handoff import codec
from kvpact.handoff.chunks import LayerBlocks, split_blocks
from kvpact.handoff.lease import Graveyard, LeaseTable, Tombstone
from kvpact.handoff.messages import Chunk, ChunkHeader, Commit, HandoffState, Open
from kvpact.handoff.session import Expected, Session, new_session
from kvpact.handoff.status import from_status, to_status
from kvpact.types import (
    AxisOrder,
    BlockId,
    ContractDigest,
    Difference,
    DifferenceAction,
    Dtype,
    Exactness,
    FrequencyPolicy,
    IdentityRelation,
    KeyState,
    LaneOrder,
    LayerKind,
    PlanOp,
    PlanStep,
    Relation,
    Verdict,
    VerdictWord,
)
from tests.factories import make_contract, make_group, make_rotary
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    Wire,
    all_parts,
    in_process_wire,
    make_handoff_id,
    make_reader,
    order_of,
    stream,
)
from tests.handoff_samples import WRITER_DIGEST

HALVES = 2
ANY = st.characters(codec="utf-8")
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
"""What sentences of a peer are made of once they are read."""
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-6, max_value=1e6)
digests = st.binary(min_size=32, max_size=32).map(ContractDigest)


@st.composite
def tables(draw: st.DrawFn) -> tuple[RotaryTable, ...]:
    uppers = sorted(draw(st.sets(st.integers(1, 1 << 20), max_size=3)))
    return tuple(
        RotaryTable(
            inv_freq=tuple(draw(st.lists(float32, min_size=HALVES, max_size=HALVES))),
            amplitude=draw(positive),
            upper_length=upper,
        )
        for upper in (*uppers, None)
    )


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    layer_count = draw(st.integers(1, 5))
    kinds = draw(
        st.lists(
            st.sampled_from((LayerKind.FULL, LayerKind.SLIDING)), min_size=layer_count, max_size=layer_count
        )
    )
    groups = []
    for layer, kind in enumerate(kinds):
        state = draw(st.sampled_from(KeyState))
        rotary = replace(
            make_rotary(key_state=state, rotary_dim=2 * HALVES),
            stored_lane_order=draw(st.sampled_from(LaneOrder)),
        )
        if state is not KeyState.NONE:
            rotary = replace(
                rotary, tables=draw(tables()), frequency_policy=draw(st.sampled_from(FrequencyPolicy))
            )
        group = make_group(
            layers=(layer,),
            kind=kind,
            window=draw(st.integers(1, 4096)) if kind is LayerKind.SLIDING else None,
            kv_heads=4,
            key_dim=draw(st.integers(4, 256)),
            value_dim=draw(st.integers(1, 256)),
            softmax_scale=draw(positive),
            rotary=rotary,
        )
        groups.append(replace(group, softcap=draw(st.none() | positive), sinks=draw(st.booleans())))
    contract = make_contract(
        layer_groups=tuple(groups),
        block_size=draw(st.integers(1, 512)),
        axis_order=draw(st.sampled_from(AxisOrder)),
        function_digest=draw(st.none() | digests),
        context_tokens=draw(st.integers(1, 1 << 30)),
        name=draw(st.text(max_size=20)),
    )
    rank = draw(st.integers(0, 1))
    shard = Shard(
        tensor_parallel_rank=rank,
        tensor_parallel_size=2,
        head_start=2 * rank,
        head_end=2 * rank + 2,
        layer_start=draw(st.integers(0, layer_count - 1)),
        layer_end=layer_count,
    )
    dtypes = st.sampled_from([dtype for dtype in Dtype if dtype is not Dtype.INT8])
    layout = replace(contract.layout, shard=shard, key_dtype=draw(dtypes), value_dtype=draw(dtypes))
    return replace(contract, layout=layout)


@st.composite
def verdicts(draw: st.DrawFn, alphabet: st.SearchStrategy[str] = ANY) -> Verdict:
    difference = st.builds(
        Difference,
        field=st.text(alphabet, min_size=1, max_size=253),
        layers=st.lists(st.integers(0, 200), max_size=8).map(tuple),
        writer=st.text(alphabet, max_size=256),
        reader=st.text(alphabet, max_size=256),
        relation=st.sampled_from(Relation),
        action=st.sampled_from(DifferenceAction),
        remedy=st.text(alphabet),
        explanation=st.text(alphabet),
    )
    step = st.builds(
        PlanStep,
        op=st.sampled_from(PlanOp),
        exactness=st.sampled_from(Exactness),
        bound_epsilons=st.none() | positive,
    )
    return Verdict(
        word=draw(st.sampled_from(VerdictWord)),
        identity=draw(st.sampled_from(IdentityRelation)),
        differences=tuple(draw(st.lists(difference, max_size=4))),
        plan=tuple(draw(st.lists(step, max_size=4))),
        exactness=draw(st.sampled_from(Exactness)),
        writer_digest=draw(digests),
        reader_digest=draw(digests),
    )


@given(contracts())
def test_a_contract_comes_back_from_its_bytes(contract: Contract) -> None:
    assert codec.contract_from_bytes(codec.contract_to_bytes(contract), schema_major=1) == contract


@given(verdicts(PRINTABLE))
def test_a_verdict_comes_back_from_its_message(verdict: Verdict) -> None:
    assert codec.decode_verdict(codec.encode_verdict(verdict)) == verdict


@given(verdicts(), st.text())
def test_any_refusal_fits_into_a_status_and_comes_back_as_a_refusal(verdict: Verdict, text: str) -> None:
    error = from_status(to_status(ContractRefused(text, verdict=verdict)))
    assert isinstance(error, ContractRefused)
    assert error.verdict.writer_digest == verdict.writer_digest


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_chunk_comes_back_from_its_bytes(payload: bytes, data: st.DataObject) -> None:
    key_bytes = data.draw(st.integers(1, len(payload)))
    numbers = st.integers(0, (1 << 31) - 1)
    header = ChunkHeader(
        handoff_id=make_handoff_id(data.draw(numbers)),
        generation=data.draw(st.integers(1, (1 << 63) - 1)),
        sequence=data.draw(numbers),
        layer=data.draw(numbers),
        block_start=data.draw(numbers),
        block_count=data.draw(st.integers(1, (1 << 31) - 1)),
        key_bytes=key_bytes,
        value_bytes=len(payload) - key_bytes,
    )
    checksum = data.draw(st.integers(0, (1 << 64) - 1))
    chunk = Chunk(header=header, checksum=checksum, keys=payload[:key_bytes], values=payload[key_bytes:])
    assert codec.push_from_bytes(codec.push_to_bytes(chunk)) == chunk


@given(st.binary(max_size=200))
def test_any_bytes_are_a_part_of_a_push_or_an_error_of_ours(data: bytes) -> None:
    try:
        codec.push_from_bytes(data)
    except (BadRequest, DataLoss):
        return


@given(st.integers(0, 1000), st.integers(0, 500), st.integers(1, 64))
def test_parts_of_a_range_joined_are_the_range(start: int, length: int, most: int) -> None:
    parts = list(split_blocks(range(start, start + length), most))
    assert [block for part in parts for block in part] == list(range(start, start + length))
    assert all(1 <= len(part) <= most for part in parts)


@st.composite
def pushes(draw: st.DrawFn) -> tuple[int, list[tuple[int, range]]]:
    """Blocks of a prompt, and (layer, blocks) of chunks in some order that together are all of two layers."""
    block_count = draw(st.integers(1, 12))
    ranges = [
        (layer, part)
        for layer in (0, 1)
        for part in split_blocks(range(block_count), draw(st.integers(1, 12)))
    ]
    return block_count, draw(st.permutations(ranges))


def push_through(block_count: int, ranges: list[tuple[int, range]]) -> Session:
    layers = tuple(LayerBlocks(layer=layer, key_bytes=2, value_bytes=1, first_block=0) for layer in (0, 1))
    handoff_id = make_handoff_id()
    session = new_session(
        Expected(
            handoff_id=handoff_id,
            generation=1,
            contract_digest=WRITER_DIGEST,
            block_count=block_count,
            layers=layers,
            chunk_cap_bytes=100,
        )
    ).open(Open(handoff_id=handoff_id, generation=1, contract_digest=WRITER_DIGEST))
    for sequence, (layer, blocks) in enumerate(ranges):
        header = ChunkHeader(
            handoff_id=handoff_id,
            generation=1,
            sequence=sequence,
            layer=layer,
            block_start=blocks.start,
            block_count=len(blocks),
            key_bytes=2 * len(blocks),
            value_bytes=len(blocks),
        )
        session = session.arrive(header, header.key_bytes, header.value_bytes)
    return session


def commit_of(session: Session) -> Commit:
    return Commit(chunk_count=session.chunk_count, payload_bytes=session.payload_bytes, first_token_id=0)


@given(pushes())
def test_chunks_in_any_order_of_blocks_make_a_push_whole(push: tuple[int, list[tuple[int, range]]]) -> None:
    session = push_through(*push)
    session.close(commit_of(session))


@given(pushes(), st.data())
def test_any_missing_chunk_leaves_a_hole_and_any_second_one_is_refused(
    push: tuple[int, list[tuple[int, range]]], data: st.DataObject
) -> None:
    block_count, ranges = push
    index = data.draw(st.integers(0, len(ranges) - 1))
    session = push_through(block_count, ranges[:index] + ranges[index + 1 :])
    with pytest.raises(DataLoss):
        session.close(commit_of(session))
    with pytest.raises(DataLoss):
        push_through(block_count, [*ranges, ranges[index]])


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10), st.booleans()), max_size=40))
def test_a_lease_lives_exactly_as_long_as_its_last_renewal_says(steps: list[tuple[int, float, bool]]) -> None:
    leases, expected, now = LeaseTable(7.0), {}, 0.0
    for number, pause_s, renewed in steps:
        now += pause_s
        handoff_id = make_handoff_id(number)
        if renewed:
            leases.renew(handoff_id, now)
            expected[handoff_id] = now + 7.0
        else:
            leases.drop(handoff_id)
            expected.pop(handoff_id, None)
        assert set(leases.expired(now)) == {key for key, expiry in expected.items() if expiry <= now}
        assert leases.next_expiry() == min(expected.values(), default=None)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 10)), max_size=40))
def test_a_graveyard_never_outgrows_its_bound(burials: list[tuple[int, float]]) -> None:
    graveyard, now = Graveyard(keep_s=5.0, most=4), 0.0
    for number, pause_s in burials:
        now += pause_s
        graveyard.bury(make_handoff_id(number), Tombstone(state=HandoffState.RELEASED, reason=""), now)
        assert len(graveyard) <= 4
        assert graveyard.find(make_handoff_id(number), now) is not None


EVENTS = ("reserve", "push", "broken push", "half a push", "renew", "release", "take", "wait")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=30))
@settings(max_examples=60)
def test_any_order_of_events_leaves_each_block_with_one_owner(events: list[tuple[str, int]]) -> None:
    asyncio.run(run_events(events))


async def run_events(events: list[tuple[str, int]]) -> None:
    async with in_process_wire(reader=make_reader(blocks=8)) as wire:
        await wire.sender().pair(READER)
        taken: list[tuple[BlockId, ...]] = []
        for event, number in events:
            with suppress(KvpactError):
                await run_event(wire, event, number, taken)
            held = wire.reader.pool.held()
            assert held.get("sequence", 0) == sum(map(len, taken))
            assert held.get("handoff", 0) == 3 * wire.reader.receiver.held()
        for blocks in taken:
            wire.reader.pool.free(blocks, "sequence")
        wire.reader.alarms.advance(1000.0)
        assert wire.reader.all_free()


async def run_event(wire: Wire, event: str, number: int, taken: list[tuple[BlockId, ...]]) -> None:
    terms = wire.terms(number=number)
    match event:
        case "reserve":
            await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
        case "push":
            await wire.port.push(stream(await all_parts(wire, terms)))
        case "broken push":
            parts = await all_parts(wire, terms)
            await wire.port.push(stream([*parts[:2], *parts[3:]]))
        case "half a push":
            await wire.port.push(stream((await all_parts(wire, terms))[:2]))
        case "renew":
            await wire.port.renew(terms.handoff_id, READER)
        case "release":
            await wire.port.release(terms.handoff_id, "by chance")
        case "take":
            taken.append(wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms)).blocks)
        case _:
            wire.reader.alarms.advance(12.0)
