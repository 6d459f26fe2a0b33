"""Handoffs over every transport: the same bytes land, the same errors come out, every block comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from kvpact.contract.canary import probe_lengths
from kvpact.contract.contract import Contract
from kvpact.errors import (
    BadRequest,
    ContractRefused,
    DataLoss,
    Exhausted,
    Fenced,
    KvpactError,
    Unavailable,
    UnknownHandoff,
)
from kvpact.handoff import pairing
from kvpact.handoff.handoff_table import ReceiverCounters, ReceiverLimits
from kvpact.handoff.messages import (
    CanaryOutcome,
    Chunk,
    Commit,
    CommitReceipt,
    HandoffState,
    HandoffTerms,
    Open,
    PushPart,
    Witness,
    WitnessReport,
)
from kvpact.handoff.outgoing import Shown
from kvpact.handoff.trust import Landed
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockId, DifferenceAction, VerdictWord, WorkerLife
from tests.factories import make_contract
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    WIRES,
    WRITER,
    FakeCache,
    Wire,
    all_parts,
    expected_blocks,
    first_token,
    make_reader,
    order_of,
    progress,
    stream,
)
from tests.region_wires import ALL_WIRES


@pytest.fixture(params=ALL_WIRES)
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    async with ALL_WIRES[request.param]() as wire:
        await wire.sender().pair(READER)
        yield wire


@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 50])
async def test_a_whole_handoff_lands_every_block_and_can_be_taken_once(
    wire: Wire, prompt_tokens: int
) -> None:
    terms = wire.terms(prompt_tokens=prompt_tokens)
    cache = FakeCache(wire.contract)
    computed = progress(*range(10, prompt_tokens, 10), prompt_tokens)
    sent = await wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, computed, cache, first_token())
    landing = wire.reader.landing
    assert landing.landed == expected_blocks(wire, terms)
    assert landing.finished == {terms.handoff_id: prompt_tokens}
    assert sent.payload_bytes == wire.reader.receiver.counters().landed_bytes
    taken = wire.reader.receiver.take(terms.handoff_id, READER, (*terms.token_ids, FIRST_TOKEN_ID))
    assert taken.blocks == landing.blocks[terms.handoff_id]
    assert (taken.token_ids, taken.next_position, taken.first_token_id) == (
        terms.token_ids,
        prompt_tokens,
        FIRST_TOKEN_ID,
    )
    with pytest.raises(Fenced, match="taken by Decode before"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    wire.reader.pool.free(taken.blocks, "sequence")
    assert wire.reader.all_free()


async def test_a_refused_pair_gets_the_whole_verdict_and_no_room(wire: Wire) -> None:
    other = make_contract(theta=1e5)
    sender = replace(wire, contract=other).sender()
    answer = await sender.pair(READER)
    assert answer.verdict.word is VerdictWord.REJECT
    assert [d.field for d in answer.verdict.differences] == ["inv_freq"]
    with pytest.raises(ContractRefused, match="inv_freq") as refused:
        await wire.port.reserve(replace(wire, contract=other).terms(), MAX_OUTPUT_TOKENS)
    assert refused.value.verdict == answer.verdict
    assert wire.reader.all_free()


async def test_a_contract_that_was_never_offered_gets_no_room(wire: Wire) -> None:
    other = replace(wire, contract=make_contract(block_size=8))
    with pytest.raises(ContractRefused, match="never offered") as refused:
        await wire.port.reserve(other.terms(), MAX_OUTPUT_TOKENS)
    assert [d.action for d in refused.value.verdict.differences] == [DifferenceAction.REJECT]


async def test_a_contract_without_identity_is_no_offer(wire: Wire) -> None:
    nameless = replace(wire, contract=make_contract(function_digest=None))
    with pytest.raises(BadRequest, match="function_digest is absent"):
        await nameless.sender().pair(READER)


async def test_a_digest_that_names_another_contract_is_refused(wire: Wire) -> None:
    sender = replace(wire, contract=make_contract(block_size=8)).sender()
    sender.digest = type(sender.digest)(b"x" * 32)
    with pytest.raises(BadRequest, match="contract_digest"):
        await sender.pair(READER)


async def test_another_life_of_the_reader_is_fenced(wire: Wire) -> None:
    gone = WorkerLife(worker=READER.worker, incarnation=b"o" * 16)
    with pytest.raises(Fenced) as fenced:
        await wire.sender().pair(gone)
    assert (fenced.value.expected, fenced.value.found) == (READER.incarnation.hex(), gone.incarnation.hex())
    with pytest.raises(Fenced):
        await wire.port.reserve(replace(wire.terms(), reader=gone), MAX_OUTPUT_TOKENS)
    await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    with pytest.raises(Fenced):
        await wire.port.renew(wire.terms().handoff_id, gone)


async def test_the_same_reservation_twice_is_one(wire: Wire) -> None:
    first = await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    assert await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS) == first
    assert wire.reader.pool.counts().free == 64 - 3
    with pytest.raises(Fenced, match="other terms"):
        await wire.port.reserve(wire.terms(prompt_tokens=41), MAX_OUTPUT_TOKENS)
    second = await wire.port.reserve(wire.terms(number=2), MAX_OUTPUT_TOKENS)
    assert second.generation > first.generation >= 1


async def test_a_reservation_is_all_or_nothing(wire: Wire) -> None:
    await wire.port.reserve(wire.terms(prompt_tokens=1000, table_length=1024), MAX_OUTPUT_TOKENS)
    with pytest.raises(Exhausted) as exhausted:
        await wire.port.reserve(wire.terms(prompt_tokens=40, number=2), MAX_OUTPUT_TOKENS)
    assert exhausted.value.retry_after_s == 1.0
    assert wire.reader.pool.counts().free == 1
    with pytest.raises(BadRequest, match="can't fit in 64 blocks"):
        await wire.port.reserve(
            wire.terms(prompt_tokens=1025, number=3, table_length=1100), MAX_OUTPUT_TOKENS
        )


async def test_a_draining_reader_reserves_nothing_new(wire: Wire) -> None:
    held = await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    await wire.reader.drain()
    assert await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS) == held
    with pytest.raises(Unavailable, match="draining"):
        await wire.port.reserve(wire.terms(number=2), MAX_OUTPUT_TOKENS)


def lost_chunk(parts: list[PushPart]) -> list[PushPart]:
    return parts[:1] + parts[2:]


def lost_last_chunk(parts: list[PushPart]) -> list[PushPart]:
    return parts[:-2] + parts[-1:]


def lost_last_chunk_told_in_totals(parts: list[PushPart]) -> list[PushPart]:
    *before, chunk, commit = parts
    assert isinstance(chunk, Chunk)
    assert isinstance(commit, Commit)
    told = replace(
        commit,
        chunk_count=commit.chunk_count - 1,
        payload_bytes=commit.payload_bytes - len(chunk.keys) - len(chunk.values),
    )
    return [*before, told]


def twice(parts: list[PushPart]) -> list[PushPart]:
    return [*parts[:2], parts[1], *parts[2:]]


def twice_renumbered(parts: list[PushPart]) -> list[PushPart]:
    again = parts[1]
    assert isinstance(again, Chunk)
    return [*parts[:2], replace(again, header=replace(again.header, sequence=1)), *parts[2:]]


def reordered(parts: list[PushPart]) -> list[PushPart]:
    return [parts[0], parts[2], parts[1], *parts[3:]]


def corrupted(parts: list[PushPart]) -> list[PushPart]:
    return _with_payload(parts, lambda values: b"\xff" + values[1:])


def moved_to_another_layer(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(parts, layer=1)


def wrong_checksum(parts: list[PushPart]) -> list[PushPart]:
    return _with_chunk(parts, lambda chunk: replace(chunk, checksum=chunk.checksum ^ 1))


def wrong_generation(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(parts, generation=99)


def another_handoff(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(parts, handoff_id=b"x" * 16)


def unknown_layer(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(parts, layer=2)


def blocks_behind_the_prompt(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(parts, block_start=1)


def truncated_payload(parts: list[PushPart]) -> list[PushPart]:
    return _with_payload(parts, lambda values: values[:-4])


def truncated_payload_and_header(parts: list[PushPart]) -> list[PushPart]:
    return _with_header(truncated_payload(parts), value_bytes=3 * 2048 - 4)


def truncated_stream(parts: list[PushPart]) -> list[PushPart]:
    return parts[:2]


def opened_twice(parts: list[PushPart]) -> list[PushPart]:
    return [parts[0], *parts]


def commit_with_other_totals(parts: list[PushPart]) -> list[PushPart]:
    commit = parts[-1]
    assert isinstance(commit, Commit)
    return [*parts[:-1], replace(commit, payload_bytes=commit.payload_bytes + 1)]


def _with_chunk(parts: list[PushPart], change: object) -> list[PushPart]:
    assert callable(change)
    return [parts[0], change(parts[1]), *parts[2:]]


def _with_payload(parts: list[PushPart], change: Callable[[bytes], bytes]) -> list[PushPart]:
    """A payload of other bytes travels in its message, whatever carries the others."""

    def changed(chunk: Chunk) -> Chunk:
        return replace(chunk.inline(), values=change(bytes(chunk.values)))

    return _with_chunk(parts, changed)


def _with_header(parts: list[PushPart], **changes: object) -> list[PushPart]:
    def change(chunk: Chunk) -> Chunk:
        return replace(chunk, header=replace(chunk.header, **changes))  # type: ignore[arg-type]

    return _with_chunk(parts, change)


FAULTS = {
    lost_chunk: (DataLoss, "order"),
    lost_last_chunk: (DataLoss, "totals"),
    lost_last_chunk_told_in_totals: (DataLoss, "holes"),
    twice: (DataLoss, "order"),
    twice_renumbered: (DataLoss, "order"),
    reordered: (DataLoss, "order"),
    corrupted: (DataLoss, "checksum"),
    moved_to_another_layer: (DataLoss, "checksum"),
    wrong_checksum: (DataLoss, "checksum"),
    wrong_generation: (Fenced, None),
    another_handoff: (Fenced, None),
    unknown_layer: (BadRequest, None),
    blocks_behind_the_prompt: (BadRequest, None),
    truncated_payload: (DataLoss, "totals"),
    truncated_payload_and_header: (BadRequest, None),
    truncated_stream: (DataLoss, "totals"),
    opened_twice: (Fenced, None),
    commit_with_other_totals: (DataLoss, "totals"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_faulty_push_ends_the_handoff_once_and_frees_every_block(wire: Wire, fault: object) -> None:
    kind, check = FAULTS[fault]  # type: ignore[index]
    terms = wire.terms()
    parts = await all_parts(wire, terms)
    assert callable(fault)
    with pytest.raises(KvpactError) as failed:
        await wire.port.push(stream(fault(parts)))
    assert type(failed.value) is kind
    if check is not None:
        assert isinstance(failed.value, DataLoss)
        assert failed.value.check == check
    assert wire.reader.all_free()
    assert wire.reader.receiver.counters().failed == 1
    with pytest.raises(UnknownHandoff, match="ended"):
        await wire.port.push(stream(parts))
    with pytest.raises(UnknownHandoff):
        await wire.port.renew(terms.handoff_id, READER)
    with pytest.raises(Fenced, match="can't be reserved"):
        await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
    assert await wire.port.release(terms.handoff_id, "late") is HandoffState.RELEASED
    assert wire.reader.landing.finished == {}
    assert wire.reader.receiver.counters().failed == 1


@pytest.mark.parametrize(
    "changes", [{"generation": 99}, {"contract_digest": b"x" * 32}], ids=["generation", "contract"]
)
async def test_a_push_opened_for_another_reservation_leaves_this_one_alone(
    wire: Wire, changes: dict[str, object]
) -> None:
    terms = wire.terms()
    parts = await all_parts(wire, terms)
    opened = parts[0]
    assert isinstance(opened, Open)
    with pytest.raises(Fenced):
        await wire.port.push(stream([replace(opened, **changes), *parts[1:]]))  # type: ignore[arg-type]
    await wire.port.push(stream(parts))
    assert (
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms)).first_token_id == FIRST_TOKEN_ID
    )


async def test_a_push_without_open_ends_nothing(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    with pytest.raises(BadRequest, match="begins with open"):
        await wire.port.push(stream(parts[1:]))
    await wire.port.push(stream(parts))


async def test_a_handoff_that_is_not_committed_cannot_be_taken(wire: Wire) -> None:
    await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    with pytest.raises(UnknownHandoff, match="isn't committed"):
        wire.reader.receiver.take(wire.terms().handoff_id, READER, order_of(wire.terms()))


async def test_an_expired_reservation_is_gone_without_new_work(wire: Wire) -> None:
    terms = wire.terms()
    parts = await all_parts(wire, terms)
    wire.reader.alarms.advance(29.0)
    assert await wire.port.renew(terms.handoff_id, READER) == 30.0
    wire.reader.alarms.advance(29.0)
    assert not wire.reader.all_free()
    wire.reader.alarms.advance(1.0)
    assert wire.reader.all_free()
    with pytest.raises(UnknownHandoff, match="lease expired"):
        await wire.port.push(stream(parts))


async def test_a_committed_handoff_without_decode_dies_by_its_lease(wire: Wire) -> None:
    terms = wire.terms()
    await wire.port.push(stream(await all_parts(wire, terms)))
    wire.reader.alarms.advance(30.0)
    assert wire.reader.all_free()
    with pytest.raises(UnknownHandoff, match="lease expired"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    assert (wire.reader.receiver.counters().committed, wire.reader.receiver.counters().expired) == (1, 1)


async def test_a_lease_that_ends_in_the_middle_of_a_push_ends_the_push(wire: Wire) -> None:
    terms = wire.terms()
    parts = await all_parts(wire, terms)
    never = asyncio.get_running_loop().create_future()

    async def stalled() -> AsyncIterator[PushPart]:
        for part in parts[:2]:
            yield part
        await asyncio.shield(never)

    pushing = asyncio.ensure_future(wire.port.push(stalled()))
    await asyncio.to_thread(wire.reader.landing.entered.wait, 10)
    wire.reader.alarms.advance(30.0)
    with pytest.raises(UnknownHandoff, match="lease expired"):
        await pushing
    never.cancel()
    await wire.reader.emptied()


async def test_a_sender_cancelled_in_the_middle_gives_every_block_back(wire: Wire) -> None:
    terms = wire.terms()
    computing = asyncio.Event()

    async def half() -> AsyncIterator[int]:
        yield 20
        computing.set()
        await asyncio.get_running_loop().create_future()

    token = asyncio.get_running_loop().create_future()
    sending = asyncio.ensure_future(
        wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, half(), FakeCache(wire.contract), token)
    )
    await computing.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await wire.reader.emptied()
    assert not token.cancelled()
    with pytest.raises(Fenced):
        await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)


async def test_a_prefill_that_fails_says_so_and_gives_every_block_back(wire: Wire) -> None:
    async def failing() -> AsyncIterator[int]:
        yield 20
        raise Exhausted("no room to prefill", retry_after_s=2.0)

    with pytest.raises(Exhausted, match="no room to prefill"):
        await wire.sender().hand_over(
            wire.terms(), MAX_OUTPUT_TOKENS, failing(), FakeCache(wire.contract), first_token()
        )
    await wire.reader.emptied()


async def test_leaving_a_reservation_without_a_push_releases_it(wire: Wire) -> None:
    async with wire.sender().reserved(wire.terms(), MAX_OUTPUT_TOKENS):
        assert wire.reader.pool.counts().free == 61
    assert wire.reader.all_free()


async def test_a_release_that_overtakes_its_reserve_keeps_it_out(wire: Wire) -> None:
    assert await wire.port.release(wire.terms().handoff_id, "cancelled") is None
    with pytest.raises(Fenced, match="released before"):
        await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)


async def test_releasing_a_committed_handoff_frees_it_and_a_taken_one_is_left_alone(wire: Wire) -> None:
    first, second = wire.terms(number=1), wire.terms(number=2)
    for terms in (first, second):
        await wire.port.push(stream(await all_parts(wire, terms)))
    assert await wire.port.release(first.handoff_id, "client left") is HandoffState.COMMITTED
    taken = wire.reader.receiver.take(second.handoff_id, READER, order_of(second))
    assert await wire.port.release(second.handoff_id, "late") is HandoffState.DECODING
    assert wire.reader.pool.counts().free == 61
    wire.reader.pool.free(taken.blocks, "sequence")
    assert wire.reader.all_free()


async def test_blocks_stay_while_a_landing_still_writes_into_them(wire: Wire) -> None:
    terms = wire.terms()
    parts = await all_parts(wire, terms)
    wire.reader.landing.gate.clear()
    pushing = asyncio.ensure_future(wire.port.push(stream(parts)))
    await asyncio.to_thread(wire.reader.landing.entered.wait, 10)
    await wire.port.release(terms.handoff_id, "client left")
    with pytest.raises(UnknownHandoff, match="client left"):
        await pushing
    assert wire.reader.pool.counts().free == 61
    assert wire.reader.receiver.held() == 1
    wire.reader.landing.gate.set()
    await wire.reader.emptied()


async def test_a_new_life_of_the_writer_ends_what_its_old_one_reserved(wire: Wire) -> None:
    await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    await wire.sender(life=replace(WRITER, incarnation=b"n" * 16)).pair(READER)
    assert wire.reader.all_free()
    with pytest.raises(Fenced, match="another life"):
        await wire.port.reserve(wire.terms(number=2), MAX_OUTPUT_TOKENS)


@pytest.mark.parametrize("name", ALL_WIRES)
async def test_many_handoffs_at_a_time_do_not_mix(name: str) -> None:
    async with ALL_WIRES[name](reader=make_reader(blocks=128)) as wire:
        sender = wire.sender()
        await sender.pair(READER)
        all_terms = [wire.terms(number=number, prompt_tokens=20 + number) for number in range(8)]
        await asyncio.gather(
            *(
                sender.hand_over(
                    terms,
                    MAX_OUTPUT_TOKENS,
                    progress(16, len(terms.token_ids)),
                    FakeCache(wire.contract),
                    first_token(),
                )
                for terms in all_terms
            )
        )
        expected = {key: value for terms in all_terms for key, value in expected_blocks(wire, terms).items()}
        assert wire.reader.landing.landed == expected


class Rows:
    """A verifier that notes what it was asked, and refuses where it is told to."""

    def __init__(self) -> None:
        self.seen: list[tuple[Landed, tuple[Witness, ...]]] = []
        self.refusal: DataLoss | None = None

    def verify(self, landed: Landed, witnesses: Sequence[Witness]) -> WitnessReport:
        self.seen.append((landed, tuple(witnesses)))
        if self.refusal is not None:
            raise self.refusal
        return WitnessReport(row_count=len(witnesses), shows_rotation=True)


class Judge:
    """A judge that answers by script; it frees the blocks that it owns, of the pool that it is given."""

    pool: BlockPool

    def __init__(self) -> None:
        self.outcome = CanaryOutcome(passed=True, max_abs_error=1e-6, tolerance=1e-4)
        self.failure: Exception | None = None
        self.expected: list[HandoffTerms] = []

    def expect(self, writer: Contract, terms: HandoffTerms) -> None:
        self.expected.append(terms)

    async def judge(
        self, writer: Contract, terms: HandoffTerms, blocks: Sequence[BlockId], first_token_id: int
    ) -> CanaryOutcome:
        assert first_token_id == FIRST_TOKEN_ID
        assert self.pool.held() == {"canary": len(blocks)}
        self.pool.free(blocks, "canary")
        if self.failure is not None:
            raise self.failure
        return self.outcome


SHOWN = (Witness(layer=0, position=3, raw_key=b"r", attended_key=b"k", value=b"v"),)


@pytest.fixture(params=ALL_WIRES)
async def checked(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Wire, Rows, Judge]]:
    rows, judge = Rows(), Judge()
    reader = make_reader(verifier=rows, judge=judge)
    judge.pool = reader.pool
    async with ALL_WIRES[request.param](reader=reader) as wire:
        await wire.sender().pair(READER)
        yield wire, rows, judge


async def hand_over(wire: Wire, terms: HandoffTerms) -> CommitReceipt:
    computed, cache = progress(len(terms.token_ids)), FakeCache(wire.contract)
    sent = await wire.sender().hand_over(
        terms, MAX_OUTPUT_TOKENS, computed, cache, first_token(), lambda: Shown(rows=SHOWN)
    )
    return sent.receipt


async def probe(wire: Wire, *, writer: WorkerLife = WRITER, number: int = 90) -> CommitReceipt:
    """The probe that the pair owes: its contracts have one table."""
    (length,) = probe_lengths(wire.contract, wire.reader.contract)
    terms = wire.terms(number=number, table_length=length)
    return await hand_over(wire, replace(terms, writer=writer, canary=True))


async def test_witnesses_reach_the_verifier_with_the_nonce_and_its_report_comes_back(
    checked: tuple[Wire, Rows, Judge],
) -> None:
    wire, rows, _ = checked
    await probe(wire)
    rows.seen.clear()
    terms = wire.terms()
    receipt = await hand_over(wire, terms)
    assert receipt.witnesses == WitnessReport(row_count=1, shows_rotation=True)
    assert receipt.canary is None
    ((landed, shown),) = rows.seen
    assert shown == SHOWN
    assert landed.terms == terms
    assert len(landed.nonce) == 16
    assert landed.blocks == wire.reader.landing.blocks[terms.handoff_id]
    assert wire.reader.landing.finished[terms.handoff_id] == 40


async def test_refused_witnesses_end_the_handoff_before_anybody_sees_it(
    checked: tuple[Wire, Rows, Judge],
) -> None:
    wire, rows, _ = checked
    await probe(wire)
    rows.refusal = DataLoss("witness of layer 0, position 3: a lie", check="witness")
    terms = wire.terms()
    with pytest.raises(DataLoss, match="layer 0, position 3: a lie") as refused:
        await hand_over(wire, terms)
    assert refused.value.check == "witness"
    assert wire.reader.all_free()
    assert wire.reader.receiver.counters().failed == 1
    with pytest.raises(UnknownHandoff, match="ended: witness of layer 0"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))


@pytest.mark.parametrize("passed", [True, False])
async def test_a_canary_is_judged_on_commit_and_gone(checked: tuple[Wire, Rows, Judge], passed: bool) -> None:
    wire, rows, judge = checked
    judge.outcome = replace(judge.outcome, passed=passed, finding="" if passed else "off by 0.5")
    terms = replace(wire.terms(), canary=True)
    receipt = await hand_over(wire, terms)
    assert receipt.canary == judge.outcome
    assert judge.expected == [terms]
    assert len(rows.seen) == 1
    assert wire.reader.all_free()
    assert wire.reader.receiver.counters() == ReceiverCounters()
    with pytest.raises(UnknownHandoff, match="it was a canary"):
        wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
    with pytest.raises(Fenced, match="can't be reserved"):
        await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)


async def test_a_judge_that_fails_leaves_nothing_behind(checked: tuple[Wire, Rows, Judge]) -> None:
    wire, _, judge = checked
    judge.failure = Unavailable("the engine is closing")
    with pytest.raises(Unavailable, match="closing"):
        await hand_over(wire, replace(wire.terms(), canary=True))
    assert wire.reader.all_free()
    assert wire.reader.receiver.counters() == ReceiverCounters()


async def test_a_canary_may_use_blocks_that_are_kept_for_growth() -> None:
    judge = Judge()
    reader = make_reader(blocks=3, limits=ReceiverLimits(growth_watermark_blocks=1), judge=judge)
    judge.pool = reader.pool
    async with WIRES["in_process"](reader=reader) as wire:
        await wire.sender().pair(READER)
        reader.pool.free(reader.pool.allocate(1, "test"), "test")
        assert (await hand_over(wire, replace(wire.terms(), canary=True))).canary is not None


async def test_a_reader_that_judges_no_canaries_gives_them_no_room(wire: Wire) -> None:
    with pytest.raises(BadRequest, match="judges no canaries"):
        await wire.port.reserve(replace(wire.terms(), canary=True), MAX_OUTPUT_TOKENS)
    assert wire.reader.all_free()


async def refused_without_probe(wire: Wire, terms: HandoffTerms) -> None:
    with pytest.raises(DataLoss, match="hasn't passed its probe") as refused:
        await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
    assert refused.value.check == "canary"
    assert wire.reader.all_free()


async def test_a_pair_reserves_nothing_before_it_passed_its_probe(checked: tuple[Wire, Rows, Judge]) -> None:
    wire, _, judge = checked
    terms = wire.terms()
    await refused_without_probe(wire, terms)
    judge.outcome = replace(judge.outcome, passed=False, finding="off by 0.5")
    await probe(wire, number=90)
    await refused_without_probe(wire, terms)
    judge.outcome = replace(judge.outcome, passed=True, finding="")
    await probe(wire, number=91)
    await wire.sender().pair(READER)
    assert (await hand_over(wire, terms)).canary is None


async def test_a_probe_that_fails_later_takes_back_what_an_earlier_one_proved(
    checked: tuple[Wire, Rows, Judge],
) -> None:
    wire, _, judge = checked
    await probe(wire, number=90)
    judge.outcome = replace(judge.outcome, passed=False, finding="off by 0.5")
    await probe(wire, number=91)
    await refused_without_probe(wire, wire.terms())


async def test_refused_rows_make_the_reader_ask_for_another_probe(checked: tuple[Wire, Rows, Judge]) -> None:
    wire, rows, _ = checked
    await probe(wire, number=90)
    rows.refusal = DataLoss("witness of layer 0, position 3: a lie", check="witness")
    with pytest.raises(DataLoss, match="a lie"):
        await hand_over(wire, wire.terms())
    rows.refusal = None
    await wire.sender().pair(READER)
    await refused_without_probe(wire, wire.terms(number=2))
    await probe(wire, number=91)
    assert (await hand_over(wire, wire.terms(number=2))).canary is None


@pytest.mark.parametrize(("broken", "asked_again"), [("checksum", True), ("totals", False)])
async def test_a_wrong_checksum_asks_for_another_probe_and_a_broken_stream_does_not(
    checked: tuple[Wire, Rows, Judge], broken: str, asked_again: bool
) -> None:
    wire, _, _ = checked
    await probe(wire)
    opened, chunk, *rest = await all_parts(wire, wire.terms())
    assert isinstance(chunk, Chunk)
    parts = [opened, replace(chunk, checksum=chunk.checksum ^ 1), *rest] if asked_again else [opened, chunk]
    with pytest.raises(DataLoss) as refused:
        await wire.port.push(stream(parts))
    assert refused.value.check == broken
    if asked_again:
        await refused_without_probe(wire, wire.terms(number=2))
    else:
        assert (await hand_over(wire, wire.terms(number=2))).canary is None


async def test_a_writer_s_next_life_has_passed_nothing(checked: tuple[Wire, Rows, Judge]) -> None:
    wire, _, _ = checked
    await probe(wire)
    reborn = WorkerLife(worker=WRITER.worker, incarnation=b"n" * 16)
    await wire.sender(life=reborn).pair(READER)
    await refused_without_probe(wire, replace(wire.terms(), writer=reborn))


async def test_each_length_that_the_pair_owes_a_probe_must_pass_one(
    checked: tuple[Wire, Rows, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, _, _ = checked
    await probe(wire, number=90)
    owed = (128, *probe_lengths(wire.contract, wire.reader.contract))
    monkeypatch.setattr(pairing, "probe_lengths", lambda *_: owed)
    await refused_without_probe(wire, wire.terms(number=2))
    await hand_over(wire, replace(wire.terms(number=91, table_length=128), canary=True))
    assert (await hand_over(wire, wire.terms(number=2))).canary is None


async def test_a_pair_too_short_for_a_probe_needs_none() -> None:
    contract = make_contract(context_tokens=2)
    judge = Judge()
    reader = make_reader(contract=contract, judge=judge)
    judge.pool = reader.pool
    async with WIRES["in_process"](contract=contract, reader=reader) as wire:
        await wire.sender().pair(READER)
        terms = wire.terms(prompt_tokens=1, table_length=2)
        assert (await hand_over(wire, terms)).canary is None
