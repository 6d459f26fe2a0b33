"""Rotary facts of 41 published models, from the keys that their configs carry (two stand for two sizes each).

data/rope_models.json has, a line each, the config, what completes one that names too little, and the facts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpact.contract.contract import Contract, RotaryTable
from kvpact.contract.rope import formula_table
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import family_of
from kvpact.contract.sources.huggingface import contract_from_config, own_cache_choice
from kvpact.contract.sources.model_config import canonical_config
from kvpact.errors import UnreadableSource
from kvpact.types import FrequencyPolicy, KeyState, LayerKind
from tests.contract.own_families import own_config, own_rotary, own_table

Model = dict[str, Any]
MODELS: list[Model] = json.loads((Path(__file__).parent / "data" / "rope_models.json").read_text())
NAMES = [model["name"] for model in MODELS]
FRAGMENTS = [model for model in MODELS if "refused_for" in model]


def _config(model: Model) -> dict[str, Any]:
    return canonical_config(model["config"] | model.get("completed_with", {}))


def _contract(model: Model) -> Contract:
    return contract_from_config(_config(model), cache=CacheChoice())


def _turning(contract: Contract, model: Model) -> list[tuple[int, bool]]:
    """Layers that turn keys, each with whether it has the table of windowed layers."""
    local = set(range(contract.layer_count())) - set(model["facts"].get("full_layers", ()))
    has_two = "local_theta" in model["facts"]
    kept = set(model["facts"].get("unturned", ()))
    return [
        (layer, has_two and layer in local) for layer in range(contract.layer_count()) if layer not in kept
    ]


def _plain(theta: float, rotary_dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_sizes_of_a_published_model(model: Model) -> None:
    facts, contract = model["facts"], _contract(model)
    full = contract.group_of(facts.get("full_layers", [0])[0] if facts.get("full_layers") else 0)
    assert (full.key_dim, full.kv_heads) == (facts["key_dim"], facts["kv_heads"])
    assert full.value_dim == facts.get("value_dim", facts["key_dim"])
    assert full.softmax_scale == pytest.approx(facts.get("softmax_scale", full.key_dim**-0.5), rel=1e-6)
    assert (full.softcap, full.sinks) == (facts.get("softcap"), facts.get("sinks", False))
    own = contract_from_config(_config(model), cache=own_cache_choice(_config(model)))
    orders = {group.rotary.stored_lane_order for group in own.layer_groups if group.rotary.tables}
    assert orders == {facts["own_order"]}


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_windows_and_unturned_layers_of_a_published_model(model: Model) -> None:
    facts, contract = model["facts"], _contract(model)
    layers = range(contract.layer_count())
    full = set(facts.get("full_layers", layers))
    for layer in layers:
        group = contract.group_of(layer)
        assert group.window == (None if layer in full else facts["window"])
        turns = layer not in facts.get("unturned", ())
        assert (group.rotary.key_state is not KeyState.NONE) == turns
        named = facts.get("temperature")
        if named is not None and (facts.get("unturned") is None or not turns):
            assert group.temperature is not None
            assert [group.temperature.formula, *group.temperature.parameters] == named
        else:
            assert group.temperature is None


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_rotation_of_a_published_model(model: Model) -> None:
    facts, contract = model["facts"], _contract(model)
    for layer, local in _turning(contract, model):
        rotary = contract.group_of(layer).rotary
        width = facts.get("local_key_dim", facts["rotary_dim"]) if local else facts["rotary_dim"]
        assert (rotary.rotary_dim, rotary.lane_offset) == (width, facts.get("lane_offset", 0))
        assert list(rotary.mrope_sections) == facts.get("sections", [])
        assert rotary.mrope_interleaved == facts.get("sections_interleaved", False)
        amplitude = 1.0 if local else facts.get("amplitude", 1.0)
        assert [table.amplitude for table in rotary.tables] == pytest.approx(
            [amplitude] * len(rotary.tables), rel=1e-6
        )
        assert [table.upper_length for table in rotary.tables] == facts.get("upper_lengths", [None])
        by_length = "upper_lengths" in facts
        policy = FrequencyPolicy.BY_REQUEST_LENGTH if by_length else FrequencyPolicy.FROZEN
        assert rotary.frequency_policy is policy


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_frequencies_of_a_published_model_worked_out_by_hand(model: Model) -> None:
    facts, contract = model["facts"], _contract(model)
    for layer, local in _turning(contract, model):
        ours = np.array(contract.group_of(layer).rotary.tables[0].inv_freq)
        theta = facts["local_theta"] if local else facts["theta"]
        width = facts.get("local_key_dim", facts["rotary_dim"]) if local else facts["rotary_dim"]
        expected = _plain(theta, width)
        if not local:
            expected /= facts.get("divided_by", 1.0)
            expected[facts.get("turning_pairs", len(expected)) :] = 0
        if local or "scaled" not in facts:
            np.testing.assert_allclose(ours, expected, rtol=1e-6)
        else:
            assert ours[0] == pytest.approx(1.0, rel=0.1)
            assert np.all(ours <= expected * (1 + 1e-6))
            assert not np.allclose(ours, expected, rtol=1e-3) or facts["scaled"] == "longrope"


def _own_layer_types(settings: Any, layers: int) -> list[str | None]:
    return getattr(settings, "layer_types", None) or [None] * layers


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_frequencies_of_a_published_model_are_transformers_own(model: Model) -> None:
    config = _config(model)
    if not family_of(config).transformers_has or config["model_type"] == "gptj":
        return
    contract, rotary = _contract(model), own_rotary(config)
    types = _own_layer_types(own_config(config), contract.layer_count())
    for layer, _ in _turning(contract, model):
        table: RotaryTable = contract.group_of(layer).rotary.tables[0]
        inv_freq, amplitude = own_table(rotary, types[layer])
        np.testing.assert_array_max_ulp(np.float32(table.inv_freq), inv_freq, maxulp=1)
        assert table.amplitude == pytest.approx(amplitude, rel=1e-7)


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_windows_of_a_published_model_are_transformers_own(model: Model) -> None:
    config = _config(model)
    if not family_of(config).transformers_has:
        return
    contract, settings = _contract(model), own_config(config)
    types = _own_layer_types(settings, contract.layer_count())
    windowed = getattr(settings, "sliding_window", None) is not None
    for layer, own in enumerate(types):
        kind = contract.group_of(layer).kind
        if kind in (LayerKind.MLA_EXPANDED, LayerKind.MLA_LATENT):
            continue
        expected = own or ("sliding_attention" if windowed else "full_attention")
        assert f"{kind}_attention" == expected


@pytest.mark.parametrize("model", FRAGMENTS, ids=[model["name"] for model in FRAGMENTS])
def test_a_config_that_names_too_little_is_refused_by_the_missing_key(model: Model) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        contract_from_config(model["config"], cache=CacheChoice())
    assert refusal.value.key == model["refused_for"]


@pytest.mark.parametrize("name", ["internlm2.5-7b", "minicpm-2b-128k"])
def test_dynamic_tables_of_a_foreign_model_worked_out_by_hand(name: str) -> None:
    model = MODELS[NAMES.index(name)]
    formula = _contract(model).layer_groups[0].rotary.formula
    assert formula is not None
    assert [formula.name, *formula.parameters] == model["facts"]["formula"]
    _, theta, width, factor, context = model["facts"]["formula"]
    for length in (context + 1, 2 * context):
        stretched = theta * (factor * length / context - (factor - 1)) ** (width / (width - 2))
        ours = formula_table(formula, length).inv_freq
        np.testing.assert_allclose(ours, _plain(stretched, width), rtol=1e-6)
    plain = _contract(model).layer_groups[0].rotary.tables[0]
    assert formula_table(formula, context) == plain


def test_the_models_are_all_there() -> None:
    assert len(MODELS) == 43
    two_sizes = {"glm-9b", "gpt-oss-120b"}
    assert len(set(NAMES) - two_sizes) == 41
