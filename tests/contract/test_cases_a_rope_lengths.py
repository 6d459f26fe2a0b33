"""Tables that depend on the length: frozen per request and chosen before its prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract, FrequencyFormula, RotaryTable
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.contract.tables import table_at
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import FrequencyPolicy, VerdictWord
from tests.contract.own_families import HEADS_16, expected_keys, own_keys, own_model, own_rotary

torch.set_num_threads(1)
DYNAMIC: dict[str, Any] = HEADS_16 | {
    "model_type": "llama", "max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0},
}  # fmt: skip
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE: dict[str, Any] = HEADS_16 | {
    "model_type": "llama", "max_position_embeddings": 128,
    "rope_scaling": {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
PHI3: dict[str, Any] = LONGROPE | {"model_type": "phi3", "original_max_position_embeddings": 32}


def _contract(config: dict[str, Any], context: int | None = None) -> Contract:
    return contract_from_config(config, cache=CacheChoice(), context_tokens=context)


def _table(config: dict[str, Any], length: int) -> RotaryTable:
    rotary = _contract(config).layer_groups[0].rotary
    table = table_at(rotary, length=length, context_tokens=256)
    assert table is not None
    return table


@pytest.mark.parametrize(("length", "theta"), [(2048, 10_000.0), (2049, 10_009.92), (4096, 30_527.74)])
def test_dynamic_theta_at_a_length(length: int, theta: float) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1,
        "max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }  # fmt: skip
    inv_freq = np.array(_table(config, length).inv_freq)
    assert inv_freq[1] ** -64 == pytest.approx(theta, rel=2e-5)
    np.testing.assert_allclose(inv_freq, theta ** -(np.arange(64) / 64), rtol=2e-6)


def test_a_dynamic_table_is_that_of_the_request_s_length_and_says_how_it_is_made() -> None:
    rotary = _contract(DYNAMIC).layer_groups[0].rotary
    assert rotary.frequency_policy is FrequencyPolicy.BY_REQUEST_LENGTH
    assert [table.upper_length for table in rotary.tables] == [32]
    assert rotary.formula is not None
    assert (rotary.formula.name, rotary.formula.parameters) == ("dynamic_ntk", (10_000.0, 16.0, 2.0, 32.0))
    assert _table(DYNAMIC, 30) == _table(DYNAMIC, 32) != _table(DYNAMIC, 33)
    assert _table(DYNAMIC, 60).inv_freq != _table(DYNAMIC, 70).inv_freq
    assert _table(DYNAMIC, 10) == _table(DYNAMIC, 32), "a longer request before it leaves nothing behind"


@pytest.mark.parametrize("length", [30, 32, 33, 40, 70])
def test_a_dynamic_table_is_transformers_own_at_that_length(length: int) -> None:
    rotary = own_rotary(DYNAMIC)
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    np.testing.assert_allclose(
        np.float32(_table(DYNAMIC, length).inv_freq), rotary.inv_freq.numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("length", [33, 40, 70])
def test_keys_under_a_dynamic_table_are_those_of_transformers_for_that_length(length: int) -> None:
    model = own_model(DYNAMIC)
    positions = [1, 5, length - 2, length - 1]
    at_zero, keys = own_keys(model, [0] * 4), own_keys(model, positions)
    rotary = _contract(DYNAMIC).layer_groups[0].rotary
    torch.testing.assert_close(expected_keys(rotary, at_zero, positions), keys, atol=2e-5, rtol=1e-4)
    plain = replace(rotary, tables=(replace(rotary.tables[0], upper_length=None),), formula=None)
    assert not torch.allclose(expected_keys(plain, at_zero, positions), keys, atol=1e-3)


@pytest.mark.parametrize("config", [LONGROPE, PHI3], ids=["llama", "phi3"])
@pytest.mark.parametrize(("length", "factors"), [(31, SHORT), (32, SHORT), (33, LONG), (128, LONG)])
def test_exactly_the_original_length_is_short(
    config: dict[str, Any], length: int, factors: list[float]
) -> None:
    table = _table(config, length)
    expected = 1 / (np.array(factors) * 1e4 ** (np.arange(8) / 8))
    np.testing.assert_allclose(table.inv_freq, expected, rtol=1e-6)
    assert table.amplitude == pytest.approx((1 + np.log(4) / np.log(32)) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("config", [LONGROPE, PHI3], ids=["llama", "phi3"])
@pytest.mark.parametrize("length", [31, 32, 33, 120])
def test_keys_under_longrope_are_those_of_transformers_for_that_length(
    config: dict[str, Any], length: int
) -> None:
    model = own_model(config)
    positions = [1, 5, length - 2, length - 1]
    at_zero, keys = own_keys(model, [0] * 4), own_keys(model, positions)
    rotary = _contract(config).layer_groups[0].rotary
    torch.testing.assert_close(expected_keys(rotary, at_zero, positions), keys, atol=2e-5, rtol=1e-4)
    short = length <= 32
    other = replace(rotary, tables=(replace(rotary.tables[short], upper_length=None),))
    assert not torch.allclose(expected_keys(other, at_zero, positions), keys, atol=1e-3)


def test_the_served_length_changes_no_table_of_a_request_s_length() -> None:
    short, long = _contract(LONGROPE, 32), _contract(LONGROPE, 128)
    assert short.layer_groups == long.layer_groups
    assert [table.upper_length for table in long.layer_groups[0].rotary.tables] == [32, None]


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize("count", [4, 7, 16])
def test_a_longrope_list_that_isnt_half_of_the_turning_lanes_is_refused(key: str, count: int) -> None:
    scaling = LONGROPE["rope_scaling"] | {key: [1.0] * count}
    with pytest.raises(UnreadableSource, match=f"{key}: found '{count} numbers', expected 8") as refusal:
        _contract(LONGROPE | {"rope_scaling": scaling})
    assert refusal.value.key == key


def test_longrope_lists_of_a_partial_rotation_are_half_of_the_turning_lanes() -> None:
    partial = PHI3 | {"partial_rotary_factor": 0.75}
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    assert len(_table(partial | {"rope_scaling": PHI3["rope_scaling"] | lists}, 10).inv_freq) == 6
    with pytest.raises(UnreadableSource, match="expected 6 numbers, half of the lanes that turn"):
        _contract(partial)


def test_dynamic_scaling_serves_lengths_beyond_the_model_s_own() -> None:
    assert _contract(DYNAMIC, 64).model.context_tokens == 64
    with pytest.raises(BadRequest, match="max_model_len"):
        _contract(DYNAMIC, 65)
    with pytest.raises(BadRequest, match="max_model_len"):
        _contract(LONGROPE, 129)


@pytest.mark.parametrize(
    ("change", "reach", "fields"),
    [
        ({}, 64, []),
        ({"factor": 4.0}, 32, []),
        ({"factor": 4.0}, 64, ["inv_freq"]),
    ],
)
def test_dynamic_tables_are_judged_at_the_length_of_the_request(
    change: dict[str, Any], reach: int, fields: list[str]
) -> None:
    other = DYNAMIC | {"rope_scaling": DYNAMIC["rope_scaling"] | change}
    verdict = compare(_contract(DYNAMIC, 64), _contract(other, 64), Policy(), reach)
    assert [difference.field for difference in verdict.differences] == fields


def test_a_table_that_moves_with_the_current_length_is_refused_past_its_switch() -> None:
    ours, theirs = _contract(DYNAMIC, 64), _contract(DYNAMIC, 64)
    moving = tuple(
        replace(group, rotary=replace(group.rotary, frequency_policy=FrequencyPolicy.BY_CURRENT_LENGTH))
        for group in theirs.layer_groups
    )
    theirs = replace(theirs, layer_groups=moving)
    assert compare(theirs, ours, Policy(), 32).word is VerdictWord.ACCEPT
    verdict = compare(theirs, ours, Policy(), 33)
    assert verdict.word is VerdictWord.REJECT
    assert [difference.field for difference in verdict.differences] == ["frequency_policy"]


@pytest.mark.parametrize(
    "parameters",
    [(0.0, 16.0, 2.0, 32.0), (1e4, 2.0, 2.0, 32.0), (1e4, 15.0, 2.0, 32.0), (1e4, 16.0, 0.5, 32.0),
     (1e4, 16.0, 2.0, 0.0), (1e4, 1e9, 2.0, 32.0), (1e4, 32.0, 2.0, 32.0), (1e38, 16.0, 1e30, 1.0),
     (1e4, 16.0, 1e308, 1.0)],
)  # fmt: skip
def test_a_formula_that_gives_no_table_leaves_the_length_without_one(parameters: tuple[float, ...]) -> None:
    rotary = _contract(DYNAMIC).layer_groups[0].rotary
    absurd = replace(rotary, formula=FrequencyFormula(name="dynamic_ntk", parameters=parameters))
    assert table_at(absurd, length=64, context_tokens=64) is None
    assert table_at(absurd, length=32, context_tokens=64) is rotary.tables[0]
