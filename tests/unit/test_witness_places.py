"""Which rows have to be shown: known to whoever has the nonce, within budget, where a rotation shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.contract.ledger import ledger
from kvpact.contract.witness_places import Place, budget_bytes, row_bytes, witness_places
from kvpact.handoff.terms import make_terms
from kvpact.handoff.witness_terms import places_to_show
from kvpact.types import Dtype, LayerKind
from tests.factories import make_contract, make_group, with_layout
from tests.handoff_fakes import READER, WRITER, make_handoff_id

NONCE = bytes(range(16))
SMOLLM2 = {"layers": 30, "kv_heads": 3, "key_dim": 64}


def places(prompt_tokens: int, nonce: bytes = NONCE, **facts: object) -> tuple[Place, ...]:
    contract = make_contract(**facts)  # type: ignore[arg-type]
    return witness_places(contract, nonce, prompt_tokens=prompt_tokens, first_tokens={})


def test_places_follow_from_nonce_and_length_alone() -> None:
    assert places(100) == places(100)
    assert places(100) != places(100, nonce=bytes(16))
    assert places(100) != places(101)


@given(
    prompt_tokens=st.integers(1, 5000), nonce=st.binary(min_size=16, max_size=16), first=st.integers(0, 5000)
)
def test_places_are_distinct_and_inside_what_is_computed(
    prompt_tokens: int, nonce: bytes, first: int
) -> None:
    found = witness_places(make_contract(), nonce, prompt_tokens=prompt_tokens, first_tokens={1: first})
    assert list(found) == sorted(set(found))
    assert {place.layer for place in found} == {0, 1}
    low = {0: 0, 1: min(first, prompt_tokens - 1)}
    assert all(low[place.layer] <= place.token < prompt_tokens for place in found)
    if prompt_tokens > 1:
        assert all(any(p.layer == layer and p.token > 0 for p in found) for layer in (0, 1))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("layers", [2, 30])
@pytest.mark.parametrize("prompt_tokens", [2, 17, 512, 4096])
def test_the_last_token_and_one_of_the_lower_half_are_always_shown(
    prompt_tokens: int, layers: int, dtype: Dtype
) -> None:
    for number in range(40):
        found = places(prompt_tokens, number.to_bytes(16, "big"), layers=layers, dtype=dtype)
        assert any(place.token == prompt_tokens - 1 for place in found)
        assert any(place.token < max(prompt_tokens // 2, 2) for place in found)


def test_each_group_shows_the_last_token_whichever_its_layer() -> None:
    groups = (make_group(layers=(0, 2)), make_group(layers=(1, 3), kind=LayerKind.SLIDING, window=64))
    contract = with_layout(make_contract(layer_groups=groups), key_dtype=Dtype.BFLOAT16)
    last = set()
    for number in range(40):
        nonce = number.to_bytes(16, "big")
        found = witness_places(contract, nonce, prompt_tokens=200, first_tokens={1: 137, 3: 137})
        ends = {place.layer for place in found if place.token == 199}
        assert ends & {0, 2}
        assert ends & {1, 3}
        last |= ends
    assert last == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("layers", "prompt_tokens", "low", "high"),
    [(80, 512, 0.0, 0.1), (30, 512, 0.05, 0.25), (30, 4096, 0.55, 0.8), (2, 512, 0.7, 0.9)],
)
def test_how_often_a_stale_block_in_all_layers_escapes_is_known(
    layers: int, prompt_tokens: int, low: float, high: float
) -> None:
    heads, width = {80: (8, 128), 30: (3, 64), 2: (2, 16)}[layers]
    contract = make_contract(layers=layers, kv_heads=heads, key_dim=width)
    stale, nonces = prompt_tokens // 16, 25
    escaped = 0
    for number in range(nonces):
        found = witness_places(
            contract, number.to_bytes(16, "big"), prompt_tokens=prompt_tokens, first_tokens={}
        )
        shown = {place.token // 16 for place in found}
        escaped += stale - len(shown)
    assert low < escaped / (nonces * stale) < high


def test_a_prompt_of_one_token_shows_position_zero() -> None:
    assert places(1) == (Place(layer=0, token=0), Place(layer=1, token=0))


@pytest.mark.parametrize(
    ("facts", "rows"),
    [
        ({}, 6),
        ({"dtype": Dtype.BFLOAT16}, 3),
        (SMOLLM2, 101),
        (SMOLLM2 | {"dtype": Dtype.BFLOAT16}, 50),
        ({"layers": 80, "kv_heads": 8, "key_dim": 128}, 170),
    ],
    ids=["tiny", "tiny in bfloat16", "SmolLM2", "SmolLM2 in bfloat16", "80 layers, within one message"],
)
def test_rows_take_at_most_one_percent_of_a_512_token_handoff(facts: dict[str, object], rows: int) -> None:
    contract = make_contract(**facts)  # type: ignore[arg-type]
    found = places(512, **facts)
    assert len(found) == rows
    assert {place.layer for place in found} == set(range(contract.layer_count()))
    spent = rows * row_bytes(contract, contract.layer_groups[0])
    assert spent <= budget_bytes(contract) <= ledger(contract, 512).handoff_bytes / 100


def test_where_a_row_a_layer_is_too_much_the_nonce_picks_layers_too() -> None:
    contract = with_layout(make_contract(layers=30), key_dtype=Dtype.INT8, value_dtype=Dtype.INT8)
    found = witness_places(contract, NONCE, prompt_tokens=512, first_tokens={})
    assert len(found) == 24
    assert len({place.layer for place in found}) == 24
    other = witness_places(contract, bytes(16), prompt_tokens=512, first_tokens={})
    assert {place.layer for place in found} != {place.layer for place in other}


def test_each_group_shows_a_row_even_where_windows_leave_one_percent_too_small() -> None:
    groups = tuple(make_group(layers=(i,), kind=LayerKind.SLIDING, window=8) for i in range(2))
    contract = make_contract(layer_groups=groups)
    found = witness_places(contract, NONCE, prompt_tokens=512, first_tokens={0: 505, 1: 505})
    assert [place.layer for place in found] == [0, 1]
    assert 2 * row_bytes(contract, groups[0]) > budget_bytes(contract)


def test_rows_lie_in_the_reach_of_their_layer_counted_in_tokens() -> None:
    groups = (
        make_group(layers=(0,)),
        make_group(layers=(1,), kind=LayerKind.SLIDING, window=32),
    )
    contract = replace(make_contract(layer_groups=groups))
    terms = make_terms(
        handoff_id=make_handoff_id(),
        writer=WRITER,
        reader=READER,
        contract=contract,
        contract_digest=b"c" * 32,  # type: ignore[arg-type]
        token_ids=range(40),
        table_length=2000,
        positions=(*range(10), *range(1000, 1030)),
    )
    for number in range(50):
        nonce = number.to_bytes(16, "big")
        found = places_to_show(contract, terms, nonce=nonce, first_computed=0)
        assert all(place.token >= 10 for place in found if place.layer == 1)
        held = places_to_show(contract, terms, nonce=nonce, first_computed=0, held=20)
        assert all(place.token >= 20 for place in held)
