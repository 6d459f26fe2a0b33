"""Slots taken for positions: pads, rings, merged batches and pictures shift one against the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpact.cli.pair import InProcessPair
from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.engine.engine import Engine
from kvpact.engine.loading import _check_served
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.handoff.messages import HandoffTerms
from kvpact.handoff.terms import check_terms, positions_of, required_positions
from kvpact.types import KeyState, LayerKind, PositionRun, Sampling, VerdictWord
from tests.factories import make_contract, make_group, make_rotary, with_rotary
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeReader,
    all_parts,
    in_process_wire,
    make_reader,
    order_of,
    stream,
)
from tests.reference_cache import JUNK
from tests.reference_handoff import decoded, gap, handed_over, terms_of
from tests.reference_model import Prefill, embedded, prefill, rotated
from tests.references import golden

torch.set_num_threads(1)
SEED = 5
STATES = [KeyState.ROTATED, KeyState.RAW]


def refusal_of(contract: Contract, terms: HandoffTerms) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        check_terms(terms, contract, context_tokens=contract.model.context_tokens)
    return refused.value


def accept(contract: Contract, terms: HandoffTerms) -> None:
    check_terms(terms, contract, context_tokens=contract.model.context_tokens)


def with_runs(terms: HandoffTerms, *runs: PositionRun) -> HandoffTerms:
    return replace(terms, positions=runs)


# ---------------------------------------------------------------- left padding


@pytest.mark.parametrize("tokens", [3, 9, 16])
@pytest.mark.parametrize("reads", STATES)
def test_a_left_padded_prompt_is_handed_over_without_its_pads_and_goes_on_at_its_own_position(
    tokens: int, reads: KeyState
) -> None:
    """Sixteen slots, the last `tokens` of them real: only these travel, from position 0 on."""
    contract, reader = make_contract(), make_contract(key_state=reads)
    x_TE = embedded(SEED, tokens + 4)
    expected = prefill(contract, SEED, x_TE).output_TE[tokens:]
    keys, values = slots_of(prefill(contract, SEED, x_TE[:tokens]), first_slot=16 - tokens)
    real = slice(16 - tokens, 16)
    cache = handed_over(contract, reader, [k[real] for k in keys], [v[real] for v in values])
    assert gap(decoded(reader, SEED, x_TE, cache, tokens), expected) < 1e-5
    accept(contract, terms_of(contract, tokens))
    assert terms_of(contract, tokens).next_position == tokens


@pytest.mark.parametrize("tokens", [3, 9])
def test_slots_of_a_padded_prompt_taken_for_positions_give_another_output(tokens: int) -> None:
    contract = make_contract()
    x_TE = embedded(SEED, tokens + 1)
    made, expected = prefill(contract, SEED, x_TE[:tokens]), prefill(contract, SEED, x_TE).output_TE[tokens:]
    slots = list(range(16 - tokens, 16))
    cache = handed_over(contract, contract, made.keys, made.values, positions=slots)
    assert gap(decoded(contract, SEED, x_TE, cache, tokens), expected) > 1e-3


def slots_of(made: Prefill, *, first_slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Raw keys and values in a padded batch's row, junk in the slots of pads."""
    return tuple(
        [torch.cat((torch.full((first_slot, *part.shape[1:]), JUNK).double(), part)) for part in parts]
        for parts in (made.keys, made.values)
    )  # type: ignore[return-value]


async def test_pads_in_front_are_refused_by_their_slot_and_left_out_position_3_follows() -> None:
    """Readers keep tokens in dense slots; a writer that has pads before them leaves the pads out."""
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        terms = wire.terms(prompt_tokens=3)
        padded = with_runs(terms, PositionRun(start=0, count=3, slot_start=13))
        with pytest.raises(
            BadRequest, match="says slot 13; this reader keeps tokens in dense slots, 0"
        ) as no:
            await wire.port.reserve(padded, MAX_OUTPUT_TOKENS)
        assert no.value.param == "terms.positions[0].slot_start"
        assert wire.reader.all_free()
        pads_too = replace(padded, token_ids=(0,) * 13 + terms.token_ids)
        assert refusal_of(wire.contract, pads_too).param == "terms.token_digest"
        await wire.port.push(stream(await all_parts(wire, terms)))
        taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
        assert (taken.positions, taken.next_position) == ((0, 1, 2), 3)
        wire.reader.pool.free(taken.blocks, "sequence")


# ---------------------------------------------------------------- two prompts in one batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    both = identified_engine(folder, blocks=32), identified_engine(folder, blocks=32)
    for engine in both:
        engine.start()
    yield both
    for engine in both:
        engine.close()


@pytest.mark.parametrize("order", [(30, 25), (25, 30)])
async def test_prompts_of_30_and_25_tokens_keep_next_positions_30_and_25(order: tuple[int, int]) -> None:
    reader: FakeReader = make_reader()
    async with in_process_wire(reader=reader) as wire:
        await wire.sender().pair(READER)
        terms = {tokens: wire.terms(prompt_tokens=tokens, number=tokens) for tokens in order}
        for tokens in order:
            await wire.port.push(stream(await all_parts(wire, terms[tokens])))
        taken = {
            tokens: reader.receiver.take(terms[tokens].handoff_id, READER, order_of(terms[tokens]))
            for tokens in order
        }
        assert {tokens: part.next_position for tokens, part in taken.items()} == {30: 30, 25: 25}
        for part in taken.values():
            reader.pool.free(part.blocks, "sequence")


@pytest.mark.parametrize("order", [(30, 25), (25, 30)])
async def test_two_prompts_decoded_together_are_each_their_own_golden(
    folder: Path, engines: tuple[Engine, Engine], order: tuple[int, int]
) -> None:
    async def collect(pair: InProcessPair, tokens: int) -> tuple[int, ...]:
        sampling = Sampling(max_output_tokens=32, ignore_eos=True)
        return tuple([part.token_id async for part in pair.generate(prompt_of(tokens), sampling)])

    async with InProcessPair(*engines) as pair:
        found = await asyncio.gather(*(collect(pair, tokens) for tokens in order))
    assert found == [golden(folder, prompt_of(tokens), 32).token_ids for tokens in order]


def test_the_longer_prompt_s_cursor_gives_the_shorter_one_another_output() -> None:
    contract = make_contract()
    x_TE = embedded(SEED, 26)
    made, expected = prefill(contract, SEED, x_TE[:25]), prefill(contract, SEED, x_TE).output_TE[25:]
    shifted = list(range(-5, 20))
    early = [rotated(contract.group_of(layer), keys, shifted) for layer, keys in enumerate(made.keys)]
    assert gap(decoded(contract, SEED, x_TE, (early, made.values), 25), expected) > 1e-3


# ---------------------------------------------------------------- pieces put one behind the other


def test_a_fragment_at_positions_that_were_given_before_is_refused() -> None:
    contract = make_contract()
    terms = terms_of(contract, 32)
    twice = with_runs(terms, PositionRun(start=0, count=16), PositionRun(start=0, count=16, slot_start=16))
    refusal = refusal_of(contract, twice)
    assert refusal.param == "terms.positions[1].start"
    assert "is 0; the run before ends at 16" in str(refusal)
    accept(contract, terms)


# ---------------------------------------------------------------- rings

WINDOW = 8


def ring_positions(tokens: int) -> list[int]:
    """The position that each slot of a ring of eight holds after `tokens` tokens."""
    return [tokens - 1 - (tokens - 1 - slot) % WINDOW for slot in range(min(tokens, WINDOW))]


def windowed(state: KeyState = KeyState.ROTATED) -> Contract:
    """Two layers that see eight keys, themselves included."""
    group = make_group(kind=LayerKind.SLIDING, window=WINDOW, rotary=make_rotary(key_state=state))
    return make_contract(layer_groups=(group,))


def test_after_12_tokens_the_slots_of_a_ring_of_8_hold_8_to_11_and_4_to_7() -> None:
    assert ring_positions(12) == [8, 9, 10, 11, 4, 5, 6, 7]
    assert ring_positions(5) == [0, 1, 2, 3, 4]
    assert ring_positions(16) == list(range(8, 16))


@pytest.mark.parametrize(
    ("tokens", "start"), [(5, 0), (7, 0), (8, 1), (9, 2), (12, 5), (16, 9), (17, 10), (40, 33)]
)
def test_a_window_needs_the_positions_that_the_next_token_sees(tokens: int, start: int) -> None:
    (needed,) = required_positions(windowed(), tokens)
    assert (needed.start, needed.end) == (start, tokens)
    held = sorted(ring_positions(tokens))
    assert set(range(start, tokens)) <= set(held)
    terms = terms_of(windowed(), tokens)
    accept(windowed(), terms)
    if start + 1 < tokens:
        late = replace(terms, required=(replace(needed, start=start + 1),))
        assert refusal_of(windowed(), late).param == "terms.required of group 0"


@pytest.mark.parametrize("tokens", [5, 7, 8, 9, 12, 16, 17])
@pytest.mark.parametrize("writes", STATES)
@pytest.mark.parametrize("reads", STATES)
def test_a_ring_that_is_unrolled_by_position_goes_on_like_the_whole_prompt(
    tokens: int, writes: KeyState, reads: KeyState
) -> None:
    """Five tokens more: across the wrap, with what the ring dropped never read."""
    writer, reader = windowed(writes), windowed(reads)
    x_TE = embedded(SEED, tokens + 5)
    made, expected = prefill(reader, SEED, x_TE[:tokens]), prefill(reader, SEED, x_TE).output_TE[tokens:]
    unrolled = [
        [by_position(rolled, tokens) for rolled in rings(parts, tokens)] for parts in (made.keys, made.values)
    ]
    cache = handed_over(writer, reader, *unrolled)
    assert gap(decoded(reader, SEED, x_TE, cache, tokens), expected) < 1e-5


@pytest.mark.parametrize("tokens", [5, 7, 8, 9, 12, 16, 17])
def test_a_ring_read_in_the_order_of_its_slots_is_wrong_once_it_wrapped(tokens: int) -> None:
    contract = windowed(KeyState.RAW)
    x_TE = embedded(SEED, tokens + 1)
    made, expected = prefill(contract, SEED, x_TE[:tokens]), prefill(contract, SEED, x_TE).output_TE[tokens:]
    behind = [
        [
            torch.cat((torch.full((max(0, tokens - WINDOW), *part.shape[1:]), JUNK).double(), part))
            for part in row
        ]
        for row in (rings(made.keys, tokens), rings(made.values, tokens))
    ]
    off = gap(decoded(contract, SEED, x_TE, handed_over(contract, contract, *behind), tokens), expected)
    assert (off > 1e-3) == (tokens % WINDOW != 0 and tokens > WINDOW)


def rings(parts: list[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    return [part[ring_positions(tokens)] for part in parts]


def by_position(ring_SHD: torch.Tensor, tokens: int) -> torch.Tensor:
    """Rows of a ring at their positions; junk at those that it dropped."""
    rows = torch.full((tokens, *ring_SHD.shape[1:]), JUNK, dtype=ring_SHD.dtype)
    rows[ring_positions(tokens)] = ring_SHD
    return rows


def test_positions_in_the_order_of_a_ring_s_slots_are_refused() -> None:
    contract = windowed()
    runs = PositionRun(start=8, count=4, slot_start=0), PositionRun(start=4, count=4, slot_start=4)
    terms = with_runs(terms_of(contract, 8, positions=list(range(4, 12))), *runs)
    assert refusal_of(contract, terms).param == "terms.positions[1].start"
    ascending = terms_of(contract, 8, positions=list(range(4, 12)))
    accept(contract, ascending)
    assert (positions_of(ascending.positions), ascending.next_position) == (tuple(range(4, 12)), 12)


# ---------------------------------------------------------------- pictures

TEXT_AND_PICTURE = [
    *((p, p, p) for p in range(4)),
    *((4, 4 + row, 4 + column) for row in range(3) for column in range(4)),
    *((p, p, p) for p in (8, 9)),
]
"""Rows (time, height, width) of 4 words, a picture of 3 by 4 and 2 words."""


def pictured() -> Contract:
    return with_rotary(make_contract(), mrope_sections=(4, 2, 2))


def test_18_tokens_with_a_picture_go_on_at_10_and_terms_of_one_row_cant_say_so() -> None:
    """The next position is told, not counted; one below the tokens before it is refused and never raised."""
    following = max(max(rows) for rows in TEXT_AND_PICTURE) + 1
    assert (len(TEXT_AND_PICTURE), following, following - len(TEXT_AND_PICTURE)) == (18, 10, -8)
    contract = pictured()
    terms = terms_of(contract, 18)
    refusal = refusal_of(contract, replace(terms, next_position=10))
    assert refusal.param == "terms.next_position"
    assert "is 10; positions end at 18" in str(refusal)
    time_row = [rows[0] for rows in TEXT_AND_PICTURE]
    repeated = with_runs(
        replace(terms, next_position=10),
        PositionRun(start=0, count=4),
        *(PositionRun(start=4, count=1, slot_start=4 + cell) for cell in range(12)),
        PositionRun(start=8, count=2, slot_start=16),
    )
    assert list(positions_of(repeated.positions)) == time_row
    assert refusal_of(contract, repeated).param == "terms.positions[2].start"


def test_text_alone_has_a_delta_of_zero() -> None:
    terms = terms_of(pictured(), 18)
    accept(pictured(), terms)
    assert terms.next_position - len(terms.token_ids) == 0


def test_a_model_with_several_position_rows_is_refused_when_it_is_loaded_and_beside_one_without() -> None:
    with pytest.raises(UnreadableSource, match="need mrope_sections, which this engine doesn't serve") as no:
        _check_served(pictured(), Path("model"))
    assert no.value.key == "mrope_sections"
    _check_served(make_contract(), Path("model"))
    for sides in ((pictured(), make_contract()), (make_contract(), pictured())):
        verdict = compare(*sides, Policy(), 64)
        assert verdict.word is VerdictWord.REJECT
        assert [part.field for part in verdict.differences] == ["mrope_sections"]
    assert compare(pictured(), pictured(), Policy(), 64).word is VerdictWord.ACCEPT
