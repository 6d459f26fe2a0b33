"""Operations that went wrong elsewhere: broken bytes, stale handoffs, restarts, reused blocks, leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.landing import CacheLanding
from kvpact.clock import new_handoff_id
from kvpact.config import HandoffConfig
from kvpact.engine.engine import Engine
from kvpact.errors import BadRequest, DataLoss, Fenced, KvpactError, UnknownHandoff
from kvpact.handoff.messages import Chunk, Commit, HandoffState, PushPart
from kvpact.types import Sampling, WorkerLife
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.faulty_pair import FaultyPair, GatedLanding
from tests.handoff_fakes import MAX_OUTPUT_TOKENS, READER, WIRES, WRITER, Wire, all_parts, order_of, stream
from tests.handoff_faults import CHUNK_STEPS, Fault, Script, Step, flipped
from tests.references import golden

OUTPUT_TOKENS = 8
SAMPLING = Sampling(max_output_tokens=OUTPUT_TOKENS, ignore_eos=True)
LEASE_S = 30.0
DEADLINE_S = 20.0
IN_MESSAGES = ("in_process", "grpc")
"""Wires whose payloads travel in the messages."""
REBORN = WorkerLife(worker=WRITER.worker, incarnation=b"W" * 16)


@pytest.fixture(params=IN_MESSAGES)
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    async with WIRES[request.param]() as wire:
        await wire.sender().pair(READER)
        yield wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """A writer whose prompts of 40 tokens go in 6 chunks, and a reader that holds one prompt of 7 blocks."""
    writer = identified_engine(folder, blocks=64, prefill_chunk_tokens=16, key_state="raw")
    reader = identified_engine(folder, blocks=12, axis_order="HND")
    for engine in (writer, reader):
        engine.start()
    yield writer, reader
    for engine in (writer, reader):
        engine.close()


async def drained(pair: FaultyPair, *engines: Engine) -> None:
    """Waits until nobody holds a block; a running forward or landing gives its own back right after it."""
    async with asyncio.timeout(DEADLINE_S):
        while pair.receiver.held() or any(engine.pool.held() for engine in engines):  # noqa: ASYNC110
            await asyncio.sleep(0)


# C9: bytes that aren't what was sent


def a_flipped_bit(chunks: list[Chunk]) -> list[Chunk]:
    return [*chunks[:2], replace(chunks[2], keys=flipped(bytes(chunks[2].keys), 77)), *chunks[3:]]


def a_truncated_last_block(chunks: list[Chunk]) -> list[Chunk]:
    return [*chunks[:-1], replace(chunks[-1], values=chunks[-1].values[:-16])]


def block_3_twice_and_block_2_never(chunks: list[Chunk]) -> list[Chunk]:
    """Of layer 0, renumbered, so that nothing but the blocks is wrong."""
    again = chunks[6]
    assert (again.header.layer, again.header.block_start) == (0, 3)
    return [*chunks[:4], replace(again, header=replace(again.header, sequence=4)), *chunks[5:]]


def all_but_the_last_bytes(chunks: list[Chunk]) -> list[Chunk]:
    return chunks[:-1]


BROKEN: dict[Callable[[list[Chunk]], list[Chunk]], tuple[str, str]] = {
    a_flipped_bit: ("checksum", r"layer 0, blocks \[1, 2\)"),
    a_truncated_last_block: ("totals", r"layer 1, blocks \[3, 4\)"),
    block_3_twice_and_block_2_never: ("checksum", r"layer 0, blocks \[3, 4\)"),
    all_but_the_last_bytes: ("totals", "layer 1: 1 blocks are missing, block 3 first"),
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
async def test_broken_bytes_are_refused_and_the_log_names_the_handoff_and_the_block(
    wire: Wire, damage: Callable[[list[Chunk]], list[Chunk]], caplog: pytest.LogCaptureFixture
) -> None:
    check, words = BROKEN[damage]
    terms = wire.terms(prompt_tokens=64)
    opened, *chunks, commit = await all_parts(wire, terms, (16, 32, 48, 64))
    with caplog.at_level(logging.INFO), pytest.raises(DataLoss, match=words) as refused:
        await wire.port.push(stream([opened, *damage(chunks), commit]))  # type: ignore[arg-type]
    assert refused.value.check == check
    assert wire.reader.all_free()
    (line,) = [text for text in caplog.messages if "ended" in text]
    assert terms.handoff_id.hex() in line
    assert str(refused.value) in line


# D2: handoffs that aren't there, or not any more


async def test_an_order_for_an_unknown_handoff_is_refused(wire: Wire) -> None:
    terms = wire.terms()
    with pytest.raises(UnknownHandoff, match="never reserved"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))


@pytest.mark.parametrize("changes", [{"block_start": 1}, {"block_start": -1}, {"block_count": 4}], ids=str)
async def test_blocks_out_of_range_are_refused_before_a_byte_lands(
    wire: Wire, changes: dict[str, int]
) -> None:
    opened, chunk, *rest = await all_parts(wire, wire.terms())
    assert isinstance(chunk, Chunk)
    wrong = replace(chunk, header=replace(chunk.header, **changes))  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        await wire.port.push(stream([opened, wrong, *rest]))
    assert wire.reader.landing.landed == {}
    assert wire.reader.all_free()


async def test_a_handoff_is_decoded_once_and_the_second_order_is_refused(wire: Wire) -> None:
    terms = wire.terms()
    await wire.port.push(stream(await all_parts(wire, terms)))
    taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    with pytest.raises(Fenced, match="taken by Decode before"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    wire.reader.pool.free(taken.blocks, "sequence")
    with pytest.raises(Fenced, match="taken by Decode before"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))


async def test_a_commit_that_names_another_first_token_than_the_user_gets_is_never_decoded(
    wire: Wire,
) -> None:
    terms = wire.terms()
    *before, commit = await all_parts(wire, terms)
    assert isinstance(commit, Commit)
    await wire.port.push(stream([*before, replace(commit, first_token_id=commit.first_token_id + 1)]))
    with pytest.raises(Fenced, match="token_ids"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    wire.reader.alarms.advance(LEASE_S)
    assert wire.reader.all_free()


async def test_an_order_after_the_lease_is_refused_though_another_prompt_has_the_blocks(wire: Wire) -> None:
    first, second = (
        wire.terms(prompt_tokens=600, number=1, table_length=700),
        wire.terms(prompt_tokens=610, number=2, table_length=700),
    )
    await wire.port.push(stream(await all_parts(wire, first)))
    wire.reader.alarms.advance(LEASE_S)
    await wire.port.push(stream(await all_parts(wire, second)))
    blocks = wire.reader.landing.blocks
    assert set(blocks[first.handoff_id]) & set(blocks[second.handoff_id])
    with pytest.raises(UnknownHandoff, match="lease expired"):
        wire.reader.receiver.take(first.handoff_id, READER, order_of(first))
    taken = wire.reader.receiver.take(second.handoff_id, READER, order_of(second))
    assert taken.token_ids == second.token_ids
    wire.reader.pool.free(taken.blocks, "sequence")


async def test_a_writer_keeps_the_blocks_of_a_transfer_that_stalls_while_it_computes_another_prompt(
    folder: Path,
) -> None:
    script, first, second = Script(), prompt_of(100, seed=21), prompt_of(90, seed=22)
    writer = identified_engine(folder, blocks=8, prefill_chunk_tokens=16)
    reader = identified_engine(folder, blocks=64)
    for engine in (writer, reader):
        engine.start()
    try:
        async with FaultyPair(writer, reader, script) as pair:
            await pair.connect()
            script.step, script.fault = CHUNK_STEPS[3], Fault.STALLED
            sending = asyncio.ensure_future(pair.answer(first, SAMPLING))
            await script.reached.wait()
            script.step = None
            following = asyncio.ensure_future(pair.answer(second, SAMPLING))
            await while_held(writer)
            assert not following.done()
            script.go.set()
            expected = [golden(folder, prompt, OUTPUT_TOKENS).token_ids for prompt in (first, second)]
            assert await asyncio.gather(sending, following) == expected
            await drained(pair, writer, reader)
    finally:
        for engine in (writer, reader):
            engine.close()


async def while_held(writer: Engine) -> None:
    """Until the writer waits for blocks: both prompts don't fit into its pool."""
    async with asyncio.timeout(DEADLINE_S):
        while writer.load_now()[1] == 0:  # noqa: ASYNC110  the engine's thread tells nobody that it waits
            await asyncio.sleep(0)


# D3: another life at the same address


async def test_messages_for_a_reader_s_old_life_are_fenced_by_the_new_one(wire: Wire) -> None:
    gone = WorkerLife(worker=READER.worker, incarnation=b"o" * 16)
    old = replace(wire.terms(), reader=gone)
    with pytest.raises(Fenced) as fenced:
        await wire.port.reserve(old, MAX_OUTPUT_TOKENS)
    assert (fenced.value.expected, fenced.value.found) == (READER.incarnation.hex(), gone.incarnation.hex())
    await wire.port.push(stream(await all_parts(wire, wire.terms())))


async def test_a_writer_s_next_life_frees_what_its_old_one_reserved_and_works_at_once(wire: Wire) -> None:
    old = wire.terms(number=1)
    parts = await all_parts(wire, old)
    await wire.sender(life=REBORN).pair(READER)
    assert wire.reader.all_free()
    with pytest.raises(UnknownHandoff, match="its writer restarted"):
        await wire.port.push(stream(parts))
    await wire.port.push(stream(await all_parts(wire, replace(wire.terms(number=2), writer=REBORN))))


async def test_an_offer_of_an_old_life_that_comes_late_is_fenced_and_ends_nothing(wire: Wire) -> None:
    await wire.sender(life=REBORN).pair(READER)
    terms = replace(wire.terms(), writer=REBORN)
    parts = await all_parts(wire, terms)
    with pytest.raises(Fenced, match="paired in another life since") as fenced:
        await wire.sender().pair(READER)
    assert (fenced.value.expected, fenced.value.found) == (REBORN.incarnation.hex(), WRITER.incarnation.hex())
    await wire.port.push(stream(parts))


# D5: blocks reused while the old writer still writes


async def test_a_prompt_in_the_blocks_of_an_aborted_transfer_decodes_as_its_golden_and_late_bytes_are_refused(
    folder: Path, engines: tuple[Engine, Engine]
) -> None:
    script, first, second = Script(), prompt_of(100, seed=31), prompt_of(90, seed=32)
    async with FaultyPair(*engines, script) as pair:
        await pair.connect()
        script.step, script.fault = CHUNK_STEPS[3], Fault.STALLED
        aborted = asyncio.ensure_future(pair.answer(first, SAMPLING))
        await script.reached.wait()
        late: list[PushPart] = list(script.sent)
        aborted.cancel()
        await asyncio.gather(aborted, return_exceptions=True)
        script.heal()
        await drained(pair, *engines)
        answering = pair.generate(second, SAMPLING)
        tokens = [(await anext(answering)).token_id]
        with pytest.raises(UnknownHandoff, match="ended"):
            await pair.receiver.push(stream(late))
        tokens += [token.token_id async for token in answering]
        assert tuple(tokens) == golden(folder, second, OUTPUT_TOKENS).token_ids
        await drained(pair, *engines)


async def test_blocks_stay_out_of_use_while_a_thread_of_an_aborted_landing_may_write(
    folder: Path, engines: tuple[Engine, Engine]
) -> None:
    script, reader = Script(), engines[1]
    first, second = prompt_of(33, seed=41), prompt_of(34, seed=42)
    landing = GatedLanding(CacheLanding(reader.cache))
    async with FaultyPair(*engines, script, landing=landing) as pair:
        aborted = asyncio.ensure_future(pair.answer(first, SAMPLING))
        await asyncio.to_thread(landing.entered.wait, DEADLINE_S)
        aborted.cancel()
        await asyncio.gather(aborted, return_exceptions=True)
        (late,) = landing.blocks.values()
        assert reader.pool.held() == {"handoff": len(late)}
        job = pair.prefill_job(new_handoff_id(), second, SAMPLING)
        async with contextlib.aclosing(pair.prefiller.prefill(job)) as events:
            await anext(events)
            assert reader.pool.held() == {"handoff": 2 * len(late)}
        landing.gate.set()
        await drained(pair, *engines)
        assert await pair.answer(second, SAMPLING) == golden(folder, second, OUTPUT_TOKENS).token_ids
        assert set(landing.blocks.popitem()[1]) & set(late)
        await drained(pair, *engines)


# D7: a lease that ends while decode is queued


async def test_a_lease_that_ends_before_decode_is_an_error_and_its_blocks_serve_the_next_prompt(
    folder: Path, engines: tuple[Engine, Engine]
) -> None:
    script, first, second = Script(), prompt_of(70, seed=51), prompt_of(71, seed=52)
    async with FaultyPair(*engines, script, handoff=HandoffConfig(lease_s=0.2)) as pair:
        answering = pair.generate(first, SAMPLING)
        await anext(answering)
        async with asyncio.timeout(DEADLINE_S):
            while pair.receiver.held():  # noqa: ASYNC110  the lease's own timer ends it
                await asyncio.sleep(0)
        assert await pair.answer(second, SAMPLING) == golden(folder, second, OUTPUT_TOKENS).token_ids
        with pytest.raises(UnknownHandoff, match="lease expired"):
            await anext(answering)
        await drained(pair, *engines)


async def test_a_slow_transfer_outlives_its_lease_because_it_is_renewed(
    folder: Path, engines: tuple[Engine, Engine]
) -> None:
    script, prompt, lease_s = Script(), prompt_of(40, seed=53), 0.3
    async with FaultyPair(*engines, script, handoff=HandoffConfig(lease_s=lease_s)) as pair:
        await pair.connect()
        script.step, script.fault = CHUNK_STEPS[2], Fault.STALLED
        sending = asyncio.ensure_future(pair.answer(prompt, SAMPLING))
        await script.reached.wait()
        asyncio.get_running_loop().call_later(3 * lease_s, script.go.set)
        assert await sending == golden(folder, prompt, OUTPUT_TOKENS).token_ids
        await drained(pair, *engines)


async def test_no_lease_ends_what_decode_took_however_long_it_is_queued(wire: Wire) -> None:
    terms = wire.terms()
    await wire.port.push(stream(await all_parts(wire, terms)))
    taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    wire.reader.alarms.advance(10 * LEASE_S)
    counts = wire.reader.pool.counts()
    assert counts.total - counts.free == len(taken.blocks)
    assert await wire.port.release(terms.handoff_id, "late") is HandoffState.DECODING
    wire.reader.pool.free(taken.blocks, "sequence")


# Disaggregated equals monolithic under faults

FAULTY_STEPS = (Step.RESERVE, Step.OPEN, CHUNK_STEPS[0], CHUNK_STEPS[3], CHUNK_STEPS[-1], Step.COMMIT)
FAULTS = (Fault.LOST, Fault.TWICE, Fault.REORDERED, Fault.CORRUPTED, Fault.CANCELLED)
CELLS = [
    (step, fault)
    for step in FAULTY_STEPS
    for fault in FAULTS
    if (step, fault) != (Step.RESERVE, Fault.REORDERED)
]


@pytest.mark.parametrize(("step", "fault"), CELLS, ids=lambda each: str(each).replace(" ", "_"))
async def test_after_a_faulty_attempt_the_same_prompt_gives_the_tokens_of_one_process(
    folder: Path, engines: tuple[Engine, Engine], step: Step, fault: Fault
) -> None:
    script, prompt = Script(), prompt_of(40, seed=100 + CELLS.index((step, fault)))
    expected = golden(folder, prompt, OUTPUT_TOKENS).token_ids
    async with FaultyPair(*engines, script) as pair:
        await pair.connect()
        script.step, script.fault = step, fault
        asking = asyncio.ensure_future(pair.answer(prompt, SAMPLING))
        if fault is Fault.CANCELLED:
            await script.reached.wait()
            asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        assert script.reached.is_set()
        assert isinstance(outcome, KvpactError | asyncio.CancelledError) or outcome == expected
        assert isinstance(outcome, tuple) == ((step, fault) in SURVIVED)
        await drained(pair, *engines)
        script.heal()
        for _ in range(2):
            assert await pair.answer(prompt, SAMPLING) == expected
        await drained(pair, *engines)


SURVIVED = {(Step.RESERVE, Fault.TWICE), (Step.COMMIT, Fault.TWICE)}
