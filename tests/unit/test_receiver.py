"""The receiver beyond one handoff's course: what terms it takes, what it keeps free, when it wakes."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvpact.contract.compare import Policy
from kvpact.errors import BadRequest, ContractRefused, Exhausted, Fenced, UnknownHandoff
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.messages import Adapter, HandoffTerms
from kvpact.handoff.terms import digest_tokens, required_positions
from kvpact.types import Exactness, LayerKind, PositionRun, VerdictWord
from tests.factories import make_contract, make_group
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    FakeReader,
    Wire,
    all_parts,
    first_token,
    in_process_wire,
    make_reader,
    order_of,
    progress,
    stream,
)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        yield wire


async def paired(reader: FakeReader) -> Wire:
    async with in_process_wire(reader=reader) as wire:
        await wire.sender().pair(READER)
    return wire


def with_run(terms: HandoffTerms, **run: int) -> HandoffTerms:
    return replace(terms, positions=(replace(PositionRun(start=0, count=40), **run),))


ADAPTER = Adapter(weights_digest=b"l" * 32, rank=8, alpha=16.0, scale=2.0, targets=("q_proj",))
WRONG_TERMS = {
    "token_digest": lambda terms: replace(terms, token_digest=b"x" * 32),
    "positions": lambda terms: with_run(terms, count=39),
    "positions[0].slot_start": lambda terms: with_run(terms, slot_start=3),
    "positions[1].start": lambda terms: replace(
        terms, positions=(PositionRun(start=0, count=20), PositionRun(start=19, count=20))
    ),
    "next_position": lambda terms: replace(terms, next_position=39),
    "table_length_tokens": lambda terms: replace(terms, table_length=39),
    "adapter": lambda terms: replace(terms, adapter=ADAPTER),
    "tables": lambda terms: replace(terms, tables=terms.tables * 2),
    "tables of group 0": lambda terms: replace(terms, tables=()),
    "required of group 0": lambda terms: replace(terms, required=()),
}


@pytest.mark.parametrize("field", WRONG_TERMS)
async def test_terms_that_disagree_get_no_room_and_the_field_is_named(wire: Wire, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await wire.port.reserve(WRONG_TERMS[field](wire.terms()), MAX_OUTPUT_TOKENS)
    assert refused.value.param == f"terms.{field}"
    assert wire.reader.all_free()


async def test_gaps_between_positions_are_taken_where_slots_stay_dense(wire: Wire) -> None:
    runs = (PositionRun(start=3, count=20, slot_start=0), PositionRun(start=60, count=20, slot_start=20))
    gapped = replace(
        wire.terms(), positions=runs, next_position=80, required=required_positions(wire.contract, 80)
    )
    sparse = replace(gapped, positions=(runs[0], replace(runs[1], slot_start=None)))
    with pytest.raises(BadRequest, match="says slot 60; this reader keeps tokens in dense slots, 20"):
        await wire.port.reserve(sparse, MAX_OUTPUT_TOKENS)
    parts = await all_parts(wire, gapped)
    await wire.port.push(stream(parts))
    taken = wire.reader.receiver.take(gapped.handoff_id, READER, order_of(gapped))
    assert taken.positions == (*range(3, 23), *range(60, 80))
    assert taken.next_position == 80
    wire.reader.pool.free(taken.blocks, "sequence")


async def test_a_table_that_is_not_the_contracts_is_refused(wire: Wire) -> None:
    terms = wire.terms()
    table = terms.tables[0].table
    assert table is not None
    other = replace(terms.tables[0], table=replace(table, inv_freq=(0.5, *table.inv_freq[1:])))
    with pytest.raises(BadRequest, match="isn't the table of the paired contract"):
        await wire.port.reserve(replace(terms, tables=(other,)), MAX_OUTPUT_TOKENS)


async def test_a_prompt_beyond_the_context_is_refused(wire: Wire) -> None:
    with pytest.raises(BadRequest, match="the context is 4096 tokens"):
        await wire.port.reserve(wire.terms(prompt_tokens=4097, table_length=4097), MAX_OUTPUT_TOKENS)
    with pytest.raises(BadRequest, match="max_output_tokens is 0"):
        await wire.port.reserve(wire.terms(), 0)


async def test_growth_has_blocks_that_reserve_leaves_free() -> None:
    wire = await paired(make_reader(blocks=8, limits=ReceiverLimits(growth_watermark_blocks=4)))
    await wire.port.reserve(wire.terms(prompt_tokens=40), MAX_OUTPUT_TOKENS)
    with pytest.raises(Exhausted, match="4 stay so"):
        await wire.port.reserve(wire.terms(prompt_tokens=32, number=2), MAX_OUTPUT_TOKENS)
    await wire.port.reserve(wire.terms(prompt_tokens=16, number=3), MAX_OUTPUT_TOKENS)
    assert wire.reader.pool.held() == {"handoff": 4}


async def test_the_largest_prompt_fits_an_empty_pool_whatever_the_watermark() -> None:
    wire = await paired(make_reader(blocks=8, limits=ReceiverLimits(growth_watermark_blocks=4)))
    await wire.port.reserve(wire.terms(prompt_tokens=128), MAX_OUTPUT_TOKENS)
    assert wire.reader.pool.counts().free == 0


async def test_a_convertible_pair_says_what_the_conversion_did_and_counts_blocks_in_each_size() -> None:
    async with in_process_wire(reader=make_reader(contract=make_contract(block_size=24))) as wire:
        answer = await wire.sender().pair(READER)
        assert answer.verdict.word is VerdictWord.CONVERT
        sent = await wire.sender().hand_over(
            wire.terms(prompt_tokens=50),
            MAX_OUTPUT_TOKENS,
            progress(50),
            FakeCache(wire.contract),
            first_token(),
        )
        assert sent.receipt.plan == answer.verdict.plan
        assert sent.receipt.exactness is Exactness.BIT_EXACT
        assert len(wire.reader.landing.landed) == 2 * 4
        assert len(wire.reader.landing.blocks[wire.terms().handoff_id]) == 3


async def test_a_policy_against_conversions_refuses_the_pair() -> None:
    reader = make_reader(contract=make_contract(block_size=24), policy=Policy(on_convertible="reject"))
    wire = await paired(reader)
    with pytest.raises(ContractRefused, match="block_size"):
        await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)


async def test_one_alarm_is_set_however_many_handoffs_there_are(wire: Wire) -> None:
    for number in range(5):
        await wire.port.reserve(wire.terms(number=number), MAX_OUTPUT_TOKENS)
        await wire.port.renew(wire.terms(number=number).handoff_id, READER)
    assert wire.reader.alarms.set_count == 1
    wire.reader.alarms.advance(30.0)
    assert wire.reader.all_free()
    wire.reader.alarms.advance(1000.0)
    assert wire.reader.alarms.set_count == 1


async def test_closing_a_receiver_ends_everything_it_holds(wire: Wire) -> None:
    await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    await wire.port.push(stream(await all_parts(wire, wire.terms(number=2))))
    wire.reader.receiver.close()
    assert wire.reader.all_free()
    with pytest.raises(UnknownHandoff, match="the worker stops"):
        await wire.port.renew(wire.terms().handoff_id, READER)


async def test_a_landing_that_fails_ends_the_handoff_with_its_error(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    wire.reader.landing.failure = RuntimeError("the cache broke")
    with pytest.raises(RuntimeError, match="the cache broke"):
        await wire.port.push(stream(parts))
    assert wire.reader.all_free()


async def test_token_ids_of_the_order_to_decode_must_be_those_handed_over(wire: Wire) -> None:
    terms = wire.terms()
    await wire.port.push(stream(await all_parts(wire, terms)))
    with pytest.raises(Fenced, match="aren't the prompt and first token"):
        wire.reader.receiver.take(terms.handoff_id, READER, (*terms.token_ids, 8))
    with pytest.raises(TypeError, match="token_ids"):
        wire.reader.receiver.take(terms.handoff_id, READER)  # type: ignore[call-arg]
    taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    assert wire.reader.pool.held() == {"sequence": 3}
    wire.reader.pool.free(taken.blocks, "sequence")


async def test_a_push_cancelled_while_bytes_land_frees_blocks_only_after_the_landing(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    wire.reader.landing.gate.clear()
    pushing = asyncio.ensure_future(wire.port.push(stream(parts)))
    await asyncio.to_thread(wire.reader.landing.entered.wait, 10)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert wire.reader.pool.counts().free == 61
    wire.reader.landing.gate.set()
    await wire.reader.emptied()


@pytest.mark.parametrize(
    ("kind", "window", "prompt_tokens", "start"),
    [
        (LayerKind.FULL, None, 40, 0),
        (LayerKind.SLIDING, 8, 40, 33),
        (LayerKind.SLIDING, 64, 40, 0),
        (LayerKind.CHUNKED, 16, 40, 32),
        (LayerKind.CHUNKED, 16, 48, 48),
    ],
)
def test_the_next_token_reaches_what_its_layer_sees(
    kind: LayerKind, window: int | None, prompt_tokens: int, start: int
) -> None:
    contract = make_contract(layer_groups=(make_group(kind=kind, window=window),))
    (required,) = required_positions(contract, prompt_tokens)
    assert (required.start, required.end) == (start, prompt_tokens)


def test_a_token_digest_is_of_little_endian_int32() -> None:
    assert digest_tokens((1, 258)) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").digest()


def test_handoff_modules_bring_no_torch() -> None:
    modules = ("receiver", "sender", "codec", "grpc_transport", "inprocess_transport", "service", "malloc")
    imports = "; ".join(f"import kvpact.handoff.{module}" for module in modules)
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
