"""Rows of cached blocks to show: within their budget, each block in turn, nothing that isn't sent."""

from __future__ import annotations

import pytest

from kvpact.contract.cached_places import cached_places
from kvpact.contract.content_identity import ContentId, NameMaker, kept_offset, own_passage
from kvpact.contract.contract import Contract
from kvpact.contract.witness_places import Place, budget_bytes, row_bytes
from kvpact.handoff.terms import make_terms
from kvpact.handoff.witness_terms import places_to_show
from kvpact.types import ContractDigest, Dtype, LayerKind
from tests.factories import make_contract, make_group
from tests.handoff_fakes import READER, WRITER, make_handoff_id

NONCE = b"n" * 16


def names_of(contract: Contract, tokens: int) -> tuple[ContentId, ...]:
    maker = NameMaker(contract, own_passage(contract), 16)
    return maker.names(range(tokens), range(tokens), tokens)


def shown(contract: Contract, tokens: int, blocks: range, nonce: bytes = NONCE) -> tuple[Place, ...]:
    names = names_of(contract, tokens)
    return cached_places(contract, nonce, names, prompt_tokens=tokens, blocks=blocks, first_blocks={})


def test_each_row_is_the_one_that_its_block_keeps() -> None:
    contract, names = make_contract(), names_of(make_contract(), 200)
    for place in shown(contract, 200, range(2, 9)):
        assert place.token == place.token // 16 * 16 + kept_offset(names[place.token // 16], 16)
        assert 2 <= place.token // 16 < 9


@pytest.mark.parametrize("layers", [2, 8, 30])
@pytest.mark.parametrize("blocks", [1, 2, 5, 6, 16, 60])
def test_no_block_is_shown_twice_before_each_was_shown_once(layers: int, blocks: int) -> None:
    contract = make_contract(layers=layers)
    found = shown(contract, 1000, range(blocks))
    assert len(set(found)) == len(found)
    times = [sum(place.token // 16 == block for place in found) for block in range(blocks)]
    assert max(times) - min(times) <= 1 or min(times) == 4 == max(times)
    if blocks <= len(found):
        assert min(times) >= 1
    assert {place.layer for place in found} == set(range(layers)) or len(found) < layers


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("layers", [2, 30, 80])
def test_rows_stay_within_one_percent_of_512_tokens(layers: int, dtype: Dtype) -> None:
    contract = make_contract(layers=layers, dtype=dtype)
    found = shown(contract, 2000, range(120))
    taken = len(found) * row_bytes(contract, contract.layer_groups[0])
    assert 0 < taken <= budget_bytes(contract)


def test_both_sides_pick_alike_and_another_nonce_picks_others() -> None:
    contract = make_contract(layers=4)
    assert shown(contract, 900, range(50)) == shown(contract, 900, range(50))
    assert shown(contract, 900, range(50)) != shown(contract, 900, range(50), b"o" * 16)


def test_without_a_cached_block_that_is_sent_there_is_nothing_to_show() -> None:
    assert shown(make_contract(), 100, range(3, 3)) == ()


def test_every_group_shows_a_row_and_none_of_a_block_that_its_window_left_behind() -> None:
    groups = (
        make_group(layers=(0, 2)),
        make_group(layers=(1, 3), kind=LayerKind.SLIDING, window=20),
    )
    contract = make_contract(layer_groups=groups)
    terms = make_terms(
        handoff_id=make_handoff_id(),
        writer=WRITER,
        reader=READER,
        contract=contract,
        contract_digest=ContractDigest(b"d" * 32),
        token_ids=range(97),
        table_length=200,
    )
    for number in range(40):
        nonce = number.to_bytes(16, "big")
        places = places_to_show(contract, terms, nonce=nonce, first_computed=96, held=32)
        cached = [place for place in places if place.token < 96]
        assert all(place.token >= 32 for place in cached)
        assert all(place.token >= 64 for place in cached if place.layer in (1, 3))
        assert {place.layer % 2 for place in cached} == {0, 1}
        computed = [place for place in places if place.token == 96]
        assert {place.layer % 2 for place in computed} == {0, 1}


def test_a_prefix_that_the_reader_holds_as_a_whole_needs_no_kept_row() -> None:
    contract = make_contract()
    terms = make_terms(
        handoff_id=make_handoff_id(),
        writer=WRITER,
        reader=READER,
        contract=contract,
        contract_digest=ContractDigest(b"d" * 32),
        token_ids=range(97),
        table_length=200,
    )
    places = places_to_show(contract, terms, nonce=NONCE, first_computed=80, held=96)
    assert {place.token for place in places} == {96}
