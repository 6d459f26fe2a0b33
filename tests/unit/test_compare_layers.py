"""Layers compared one by one: groups say nothing, a mutated layer is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.types import Difference, KeyState, LayerKind, Relation, Verdict, VerdictWord
from tests.factories import make_contract, make_group, make_rotary

BASE = make_contract()


def verdict_of(writer: Contract, reader: Contract) -> Verdict:
    return compare(writer, reader, Policy(), 4096)


def only_difference(writer: Contract, reader: Contract) -> Difference:
    (difference,) = verdict_of(writer, reader).differences
    return difference


def test_groups_cut_differently_with_one_meaning_are_accepted() -> None:
    group = BASE.layer_groups[0]
    apart = (replace(group, layers=(1,)), replace(group, layers=(0,)))
    assert verdict_of(BASE, replace(BASE, layer_groups=apart)).differences == ()


def layered(**mutations: object) -> Contract:
    """Three windowed layers with one table and a full one with another; layer 1 mutated."""
    windowed = make_group(layers=(0, 2), kind=LayerKind.SLIDING, window=8)
    mutated = replace(replace(windowed, layers=(1,)), **mutations)  # type: ignore[arg-type]
    full = make_group(layers=(3,), rotary=make_rotary(theta=1e6))
    return make_contract(layer_groups=(windowed, mutated, full))


@pytest.mark.parametrize(
    ("mutation", "field"),
    [
        ({"window": 9}, "window"),
        ({"rotary": make_rotary(theta=2e4)}, "inv_freq"),
        (
            {"rotary": make_rotary(inv_freq=tuple(n / 8 for n in make_rotary().tables[0].inv_freq))},
            "inv_freq",
        ),
        ({"rotary": make_rotary(key_state=KeyState.NONE)}, "key_state"),
    ],
)
def test_one_mutated_layer_is_named(mutation: dict[str, object], field: str) -> None:
    assert verdict_of(layered(), layered()).differences == ()
    difference = only_difference(layered(), layered(**mutation))
    assert (difference.field, difference.layers) == (field, (1,))


def test_a_field_that_differs_in_several_ways_stays_one_difference() -> None:
    windowed, full = layered().layer_groups[0], layered().layer_groups[2]
    other = (
        replace(windowed, layers=(0, 1, 2), rotary=make_rotary(theta=2e4)),
        replace(full, rotary=make_rotary(theta=3e6)),
    )
    difference = only_difference(layered(), make_contract(layer_groups=other))
    assert (difference.field, difference.layers) == ("inv_freq", (0, 1, 2, 3))
    assert difference.reader.startswith("layers 0-2: [1] ")
    assert "; layer 3: [1] " in difference.reader


def test_a_field_may_be_convertible_in_some_layers_and_refused_in_others() -> None:
    rotary = make_rotary(key_state=KeyState.RAW)
    mixed = (
        make_group(layers=(0,), rotary=rotary),
        make_group(layers=(1,), rotary=make_rotary(key_state=KeyState.NONE)),
    )
    verdict = verdict_of(BASE, make_contract(layer_groups=mixed))
    assert verdict.word is VerdictWord.REJECT
    assert {(part.relation, part.layers) for part in verdict.differences} == {
        (Relation.CONVERTIBLE, (0,)),
        (Relation.INCOMPATIBLE, (1,)),
    }


def test_missing_and_extra_layers_are_named() -> None:
    difference = only_difference(BASE, make_contract(layers=4))
    assert (difference.field, difference.layers) == ("layers", (2, 3))
    assert (difference.writer, difference.reader) == ("2: layers 0-1", "4: layers 0-3")


def test_another_rotary_width_is_named_beside_its_table() -> None:
    fields = [part.field for part in verdict_of(BASE, make_contract(rotary_dim=4)).differences]
    assert fields == ["inv_freq", "rotary_dim"]
