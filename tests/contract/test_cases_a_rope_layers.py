"""Per-layer rotation: layers with another table, layers that never turn, and which list says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config, own_cache_choice
from kvpact.errors import UnreadableSource
from kvpact.types import KeyState, LayerKind, VerdictWord
from tests.contract.own_families import FAMILIES, HEADS_16, expected_keys, own_keys, own_model

torch.set_num_threads(1)
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA: dict[str, Any] = HEADS_16 | {
    "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 4, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "rope_scaling": LINEAR, "query_pre_attn_scalar": 16,
}  # fmt: skip
NOPE: dict[str, Any] = HEADS_16 | {"model_type": "smollm3"}
POSITIONS = [3, 17, 101, 120]


def _contract(config: dict[str, Any], **choice: Any) -> Contract:
    return contract_from_config(config, cache=CacheChoice(**choice))


def _refused(writer: dict[str, Any], reader: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    verdict = compare(_contract(writer), _contract(reader), Policy(), 256)
    assert verdict.word is VerdictWord.REJECT
    return {difference.field: difference.layers for difference in verdict.differences}


def test_scaling_of_global_layers_stays_off_windowed_layers() -> None:
    contract = _contract(GEMMA)
    windowed, full = contract.group_of(0), contract.group_of(3)
    assert (windowed.layers, windowed.kind, windowed.window) == ((0, 1, 2), LayerKind.SLIDING, 8)
    assert (full.layers, full.kind, full.window) == ((3,), LayerKind.FULL, None)
    step = np.arange(0, 16, 2) / 16
    np.testing.assert_allclose(windowed.rotary.tables[0].inv_freq, 1e4**-step, rtol=1e-6)
    np.testing.assert_allclose(full.rotary.tables[0].inv_freq, 1e6**-step / 8, rtol=1e-6)


@pytest.mark.parametrize(
    "spelling",
    [
        {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
        {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window_pattern": 6},
        {
            "rope_scaling": None,
            "rope_parameters": {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}},
        },
        {
            "rope_theta": 1000000,
            "rope_scaling": {"type": "linear", "factor": 8},
        },
    ],
)
def test_layer_types_and_a_pattern_of_one_meaning_are_one_contract(spelling: dict[str, Any]) -> None:
    dropped = ("rope_theta", "rope_local_base_freq") if "rope_parameters" in spelling else ()
    config = {key: value for key, value in GEMMA.items() if key not in dropped} | spelling
    assert _contract(config) == _contract(GEMMA)


@pytest.mark.parametrize(
    ("change", "field", "layers"),
    [
        ({"rope_theta": 5e5}, "inv_freq", (3,)),
        ({"rope_local_base_freq": 2e4}, "inv_freq", (0, 1, 2)),
        ({"rope_scaling": LINEAR | {"factor": 4.0}}, "inv_freq", (3,)),
        ({"rope_scaling": None}, "inv_freq", (3,)),
        ({"sliding_window": 16}, "window", (0, 1, 2)),
        ({"layer_types": [FULL, SLIDING, SLIDING, FULL]}, "kind", (0,)),
    ],
)
def test_a_change_of_some_layers_is_refused_naming_them(
    change: dict[str, Any], field: str, layers: tuple[int, ...]
) -> None:
    assert _refused(GEMMA, GEMMA | change)[field] == layers
    assert compare(_contract(GEMMA), _contract(GEMMA), Policy(), 256).word is VerdictWord.ACCEPT


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "olmo3", "cohere2", "exaone4"])
@pytest.mark.parametrize("first", [FULL, SLIDING])
def test_either_kind_of_layer_turns_keys_as_the_family_does(family: str, first: str) -> None:
    other = {FULL: SLIDING, SLIDING: FULL}[first]
    config = FAMILIES[family] | {"model_type": family, "layer_types": [first, other, other, FULL]}
    if family in ("gemma3_text", "olmo3"):
        config |= {"rope_scaling": LINEAR}
    rotary = contract_from_config(config, cache=own_cache_choice(config)).group_of(0).rotary
    model = own_model(config)
    at_zero, keys = own_keys(model, [0] * 4), own_keys(model, POSITIONS)
    torch.testing.assert_close(expected_keys(rotary, at_zero, POSITIONS), keys, atol=2e-5, rtol=1e-4)
    never = family in ("cohere2", "exaone4") and first == FULL
    assert (rotary.key_state is KeyState.NONE) == never
    assert torch.allclose(keys, at_zero, atol=1e-3) == never


def test_windowless_exaone_turns_every_layer() -> None:
    config = FAMILIES["exaone4"] | {"model_type": "exaone4", "sliding_window": None}
    (group,) = _contract(config).layer_groups
    assert (group.kind, group.rotary.key_state) == (LayerKind.FULL, KeyState.ROTATED)
    config |= {"layer_types": [FULL] * 4}
    model = own_model(config)
    at_zero, keys = own_keys(model, [0] * 4), own_keys(model, POSITIONS)
    torch.testing.assert_close(expected_keys(group.rotary, at_zero, POSITIONS), keys, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["smollm3", "llama4_text"])
@pytest.mark.parametrize(
    "spelling",
    [{}, {"no_rope_layers": None}, {"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]},
     {"no_rope_layers": [], "no_rope_layer_interval": 4}],
)  # fmt: skip
def test_a_one_means_that_the_layer_turns_and_an_empty_list_means_the_interval(
    family: str, spelling: dict[str, Any]
) -> None:
    contract = _contract(FAMILIES[family] | {"model_type": family} | spelling)
    states = [contract.group_of(layer).rotary.key_state for layer in range(4)]
    assert states == [KeyState.ROTATED] * 3 + [KeyState.NONE]


@pytest.mark.parametrize(
    ("wrong", "layers"), [([1, 1, 1, 1], (3,)), ([0, 0, 0, 1], (0, 1, 2, 3)), ([1, 0, 1, 0], (1,))]
)
def test_turning_an_unturned_layer_or_an_inverted_list_is_refused_naming_layers(
    wrong: list[int], layers: tuple[int, ...]
) -> None:
    assert _refused(NOPE, NOPE | {"no_rope_layers": wrong})["key_state"] == layers


@pytest.mark.parametrize("wrong", [[1, 1], [1, 1, 1, 2], "1110", [1, 1, 1, None]])
def test_a_no_rope_list_that_cant_be_read_is_refused(wrong: object) -> None:
    with pytest.raises(UnreadableSource, match="no_rope_layers"):
        _contract(NOPE | {"no_rope_layers": wrong})


@pytest.mark.parametrize("state", [KeyState.RAW, KeyState.ROTATED])
def test_a_layer_that_never_turns_is_the_same_in_every_form_of_cache(state: KeyState) -> None:
    assert _contract(NOPE, key_state=state).group_of(3) == _contract(NOPE).group_of(3)


def test_unturned_layers_of_llama_4_see_everything_and_have_a_temperature() -> None:
    config = FAMILIES["llama4_text"] | {"model_type": "llama4_text", "attn_temperature_tuning": 4}
    chunked, full = _contract(config).layer_groups
    assert (chunked.kind, chunked.window, chunked.temperature) == (LayerKind.CHUNKED, 8, None)
    assert (full.layers, full.kind) == ((3,), LayerKind.FULL)
    assert full.temperature is not None
    assert (full.temperature.formula, full.temperature.parameters) == ("llama4_log1p", (8192.0, 0.1))
    off = _contract(config | {"attn_temperature_tuning": False}).group_of(3)
    assert off.temperature is None


def test_flat_settings_of_a_family_with_one_set_per_layer_type_are_refused() -> None:
    config = {key: value for key, value in GEMMA.items() if not key.startswith("rope")}
    with pytest.raises(UnreadableSource, match="settings under full_attention and sliding_attention"):
        _contract(config | {"rope_parameters": {"rope_theta": 1e6}})
    nested = {FULL: {"rope_theta": 1e6}, "rope_theta": 1e4}
    with pytest.raises(UnreadableSource, match=r"rope_parameters\.rope_theta"):
        _contract(config | {"rope_parameters": nested})
    truncated = {FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}
    with pytest.raises(UnreadableSource, match="truncate"):
        _contract(config | {"rope_parameters": truncated})
