"""How many lanes turn and which of them pair: widths that were dropped, orders that were assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config, own_cache_choice
from kvpact.errors import UnreadableSource
from kvpact.types import LaneOrder, LayerKind, VerdictWord
from tests.contract.own_families import FAMILIES, HEADS_16, SMALL, own_keys, own_model

torch.set_num_threads(1)
NEOX: dict[str, Any] = {
    key: value for key, value in SMALL.items() if key != "num_key_value_heads"
} | {"model_type": "gpt_neox"}  # fmt: skip
GLM: dict[str, Any] = HEADS_16 | {"model_type": "glm"}
MINIMAX: dict[str, Any] = FAMILIES["minimax_m2"] | {"model_type": "minimax_m2"}


def _contract(config: dict[str, Any]) -> Contract:
    return contract_from_config(config, cache=CacheChoice())


def _width(config: dict[str, Any]) -> int:
    return _contract(config).layer_groups[0].rotary.rotary_dim


@pytest.mark.parametrize(
    "spelling",
    [
        {"partial_rotary_factor": 0.25},
        {"rotary_pct": 0.25},
        {"rotary_dim": 4},
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rotary_pct": 0.25, "partial_rotary_factor": 0.25, "rotary_dim": 4},
        {},
    ],
)
def test_four_of_sixteen_lanes_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert _contract(NEOX | spelling) == _contract(NEOX | {"rotary_pct": 0.25})
    rotary = _contract(NEOX | spelling).layer_groups[0].rotary
    assert (rotary.rotary_dim, rotary.lane_offset) == (4, 0)
    np.testing.assert_allclose(rotary.tables[0].inv_freq, [1.0, 0.01], rtol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "width"),
    [("phi", 8), ("stablelm", 4), ("gpt_neox", 4), ("glm", 8), ("glm4", 8), ("phi3", 16), ("llama", 16)],
)
def test_an_absent_width_is_the_architecture_s_own(model_type: str, width: int) -> None:
    sizes = NEOX if model_type == "gpt_neox" else HEADS_16
    assert _width(sizes | {"model_type": model_type}) == width


@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_legacy_rotary_dim_isnt_dropped(width: int) -> None:
    assert _width(MINIMAX | {"rotary_dim": width}) == width
    model = own_model(MINIMAX | {"rotary_dim": width})
    at_zero, keys = own_keys(model, [0, 0]), own_keys(model, [5, 77])
    assert torch.equal(at_zero[..., width:], keys[..., width:])
    assert not torch.equal(at_zero[..., :width], keys[..., :width])


def test_lanes_that_dont_turn_arrive_as_they_were() -> None:
    rotary = _contract(NEOX).layer_groups[0].rotary
    k_THD = torch.randn(3, 2, 16)
    turned = rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([1, 9, 200])))
    assert torch.equal(turned[..., 4:], k_THD[..., 4:])
    assert not torch.equal(turned[..., :4], k_THD[..., :4])


def test_another_width_is_refused() -> None:
    verdict = compare(_contract(NEOX), _contract(NEOX | {"rotary_pct": 1.0}), Policy(), 256)
    assert verdict.word is VerdictWord.REJECT
    assert "rotary_dim" in {difference.field for difference in verdict.differences}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (NEOX | {"rotary_pct": 0.25, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (NEOX | {"rotary_pct": 0.25, "rotary_dim": 8}, "rotary_dim"),
        (NEOX | {"rotary_dim": 5}, "rotary_dim"),
        (NEOX | {"rotary_dim": 18}, "rotary_dim"),
        (NEOX | {"rotary_pct": 0.2}, "partial_rotary_factor"),
        (NEOX | {"rotary_pct": 0.0}, "partial_rotary_factor"),
        (NEOX | {"rotary_pct": 1.5}, "partial_rotary_factor"),
        (NEOX | {"rotary_pct": "0.25"}, "partial_rotary_factor"),
        (HEADS_16 | {"model_type": "llama", "rotary_pct": 0.25}, "partial_rotary_factor"),
        (HEADS_16 | {"model_type": "llama", "rotary_dim": 4}, "rotary_dim"),
        (FAMILIES["gptj"] | {"model_type": "gptj", "rotary": False}, "rotary"),
        ({"model_type": "phi-msft", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 9}, "rotary_dim"),
    ],
)  # fmt: skip
def test_a_width_that_cant_be_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        _contract(config)
    assert refusal.value.key == key


def test_a_quarter_of_each_half_isnt_the_first_quarter() -> None:
    """Proportional: the same frequencies and a tail of zeros, but pairs lie half a head apart."""
    lanes = 16
    base = HEADS_16 | {"model_type": "llama"}
    proportional = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    rotary = _contract(base | {"rope_parameters": proportional}).layer_groups[0].rotary
    assert rotary.rotary_dim == lanes
    np.testing.assert_allclose(rotary.tables[0].inv_freq, [1.0, 1e6 ** (-2 / 16), *[0.0] * 6], rtol=1e-6)
    k_THD = torch.randn(1, 1, lanes)
    turned = rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.tensor([7])))
    assert (turned != k_THD).flatten().nonzero().flatten().tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize(
    ("model_type", "order"),
    [("gptj", LaneOrder.ADJACENT), ("glm", LaneOrder.ADJACENT), ("glm4", LaneOrder.ADJACENT),
     ("cohere", LaneOrder.ADJACENT), ("cohere2", LaneOrder.ADJACENT), ("llama4_text", LaneOrder.ADJACENT),
     ("deepseek_v2", LaneOrder.ADJACENT), ("deepseek_v3", LaneOrder.HALF_SPLIT),
     ("glm4_moe", LaneOrder.HALF_SPLIT), ("qwen3_vl_text", LaneOrder.HALF_SPLIT),
     ("gpt_neox", LaneOrder.HALF_SPLIT)],
)  # fmt: skip
def test_the_lane_order_of_transformers_own_cache(model_type: str, order: LaneOrder) -> None:
    config = FAMILIES[model_type] | {"model_type": model_type}
    assert own_cache_choice(config).stored_lane_order is order
    rotary = contract_from_config(config, cache=own_cache_choice(config)).group_of(0).rotary
    assert rotary.stored_lane_order is order


@pytest.mark.parametrize("model_type", ["gptj", "deepseek_v3"])
def test_a_cache_is_in_the_engine_s_lane_order_unless_it_says_otherwise(model_type: str) -> None:
    config = FAMILIES[model_type] | {"model_type": model_type}
    adjacent = contract_from_config(config, cache=CacheChoice(stored_lane_order=LaneOrder.ADJACENT))
    half_split = _contract(config)
    assert half_split.layer_groups[0].rotary.stored_lane_order is LaneOrder.HALF_SPLIT
    groups = tuple(
        replace(group, rotary=replace(group.rotary, stored_lane_order=LaneOrder.ADJACENT))
        for group in half_split.layer_groups
    )
    assert groups == adjacent.layer_groups


def test_the_two_deepseeks_store_one_latent_row_in_two_orders() -> None:
    """The keys before the turn are the same lanes, in another order: scores of one side alone can't tell."""
    v2, v3 = (FAMILIES[name] | {"model_type": name} for name in ("deepseek_v2", "deepseek_v3"))
    ours, theirs = (contract_from_config(config, cache=own_cache_choice(config)) for config in (v2, v3))
    for contract in (ours, theirs):
        group = contract.layer_groups[0]
        assert group.kind is LayerKind.MLA_LATENT
        assert group.latent is not None
        assert (group.latent.latent_dim, group.latent.rope_dim, group.latent.content_first) == (24, 8, True)
        assert (group.kv_heads, group.rotary.lane_offset, group.rotary.rotary_dim) == (1, 24, 8)
    orders = [contract.layer_groups[0].rotary.stored_lane_order for contract in (ours, theirs)]
    assert orders == [LaneOrder.ADJACENT, LaneOrder.HALF_SPLIT]


def test_latent_attention_without_interleaved_weights_stores_the_same_order() -> None:
    config = FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "rope_interleave": False}
    assert own_cache_choice(config).stored_lane_order is LaneOrder.HALF_SPLIT


def test_expanded_heads_turn_behind_their_content_lanes() -> None:
    group = _contract(FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3"}).layer_groups[0]
    assert (group.kind, group.latent) == (LayerKind.MLA_EXPANDED, None)
    assert (group.kv_heads, group.key_dim, group.value_dim) == (4, 24, 12)
    assert (group.rotary.lane_offset, group.rotary.rotary_dim) == (16, 8)


def test_interleaved_sections_of_positions_say_nothing_about_pairs() -> None:
    config = FAMILIES["qwen3_vl_text"] | {"model_type": "qwen3_vl_text"}
    rotary = _contract(config).layer_groups[0].rotary
    assert (rotary.mrope_sections, rotary.mrope_interleaved) == ((4, 2, 2), True)
    assert rotary.stored_lane_order is LaneOrder.HALF_SPLIT
    plain = _contract(FAMILIES["qwen2_5_vl_text"] | {"model_type": "qwen2_5_vl_text"}).layer_groups[0].rotary
    assert (plain.mrope_sections, plain.mrope_interleaved) == ((2, 3, 3), False)
    with pytest.raises(UnreadableSource, match="mrope_section"):
        _contract(config | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 3]}})
