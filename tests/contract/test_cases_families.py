"""Every family's contract against the family's own code: a rotation, window or scale that was guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.contract import Contract
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import FAMILIES as KNOWN
from kvpact.contract.sources.huggingface import contract_from_config, own_cache_choice, unread_keys
from kvpact.errors import UnreadableSource
from kvpact.types import KeyState, LaneOrder, LayerKind
from tests.contract.own_families import (
    FAMILIES,
    expected_keys,
    own_attentions,
    own_config,
    own_keys,
    own_model,
    own_rotary,
    own_table,
)

torch.set_num_threads(1)
POSITIONS = [3, 17, 101, 120]
OTHER = {LaneOrder.HALF_SPLIT: LaneOrder.ADJACENT, LaneOrder.ADJACENT: LaneOrder.HALF_SPLIT}
BUILT = sorted(FAMILIES)


def _config(model_type: str) -> dict[str, Any]:
    return FAMILIES[model_type] | {"model_type": model_type}


def _own_form(config: dict[str, Any]) -> Contract:
    return contract_from_config(config, cache=own_cache_choice(config))


def test_every_family_that_transformers_can_build_is_compared() -> None:
    assert {name for name, family in KNOWN.items() if family.transformers_has} == set(FAMILIES)


@pytest.mark.parametrize("model_type", BUILT)
def test_a_family_s_keys_in_its_own_cache_are_those_of_its_contract(model_type: str) -> None:
    """Also the other lane order must give other keys, else this could not fail."""
    config = _config(model_type)
    contract = _own_form(config)
    group = contract.group_of(0)
    model = own_model(config)
    latent = group.kind is LayerKind.MLA_LATENT
    at_zero = own_keys(model, [0] * len(POSITIONS), latent=latent)
    keys = own_keys(model, POSITIONS, latent=latent)
    if group.rotary.key_state is KeyState.NONE:
        torch.testing.assert_close(keys, at_zero)
        return
    torch.testing.assert_close(expected_keys(group.rotary, at_zero, POSITIONS), keys, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(keys, at_zero, atol=1e-3)
    swapped = replace(group.rotary, stored_lane_order=OTHER[group.rotary.stored_lane_order])
    assert not torch.allclose(expected_keys(swapped, at_zero, POSITIONS), keys, atol=1e-3)


@pytest.mark.parametrize("model_type", BUILT)
def test_a_family_s_cache_has_the_heads_and_lanes_of_its_contract(model_type: str) -> None:
    config = _config(model_type)
    group = _own_form(config).group_of(0)
    keys = own_keys(own_model(config), [0, 1], latent=group.kind is LayerKind.MLA_LATENT)
    assert tuple(keys.shape[1:]) == (group.kv_heads, group.key_dim)


@pytest.mark.parametrize("model_type", BUILT)
def test_a_family_s_softmax_scale_is_its_modules_own(model_type: str) -> None:
    config = _config(model_type)
    contract = contract_from_config(config, cache=CacheChoice())
    for layer, module in enumerate(own_attentions(own_model(config))):
        own = getattr(module, "scaling", None) or module.inv_norm_factor
        assert contract.group_of(layer).softmax_scale == own


@pytest.mark.parametrize("model_type", BUILT)
def test_a_family_s_layer_kinds_and_windows_are_its_own(model_type: str) -> None:
    config = _config(model_type)
    contract = contract_from_config(config, cache=CacheChoice())
    own = own_config(config)
    window = getattr(own, "sliding_window", None)
    types = getattr(own, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 4
    sizes = {"sliding_attention": window, "chunked_attention": getattr(own, "attention_chunk_size", None)}
    expected = [sizes.get(layer_type) for layer_type in types[: contract.layer_count()]]
    assert [contract.group_of(layer).window for layer in range(contract.layer_count())] == expected


@pytest.mark.parametrize("model_type", sorted(set(BUILT) - {"gptj"}))
def test_a_family_s_tables_are_its_rotary_module_s(model_type: str) -> None:
    config = _config(model_type)
    rotary = own_rotary(config)
    types = getattr(own_config(config), "layer_types", None)
    contract = contract_from_config(config, cache=CacheChoice())
    for layer in range(contract.layer_count()):
        ours = contract.group_of(layer).rotary
        if ours.key_state is KeyState.NONE:
            continue
        inv_freq, amplitude = own_table(rotary, types[layer] if types else None)
        np.testing.assert_array_max_ulp(np.float32(ours.tables[0].inv_freq), inv_freq, maxulp=1)
        assert ours.tables[0].amplitude == pytest.approx(amplitude, rel=1e-7)


@pytest.mark.parametrize(
    ("model_type", "flag"),
    [("smollm3", "use_rope"), ("llama4_text", "use_rope"), ("cohere2", "sliding_window")],
)
def test_layers_that_never_turn_keys_are_the_family_s_own(model_type: str, flag: str) -> None:
    config = _config(model_type)
    contract = contract_from_config(config, cache=CacheChoice())
    turning = [contract.group_of(layer).rotary.key_state is not KeyState.NONE for layer in range(4)]
    assert turning == [bool(getattr(module, flag)) for module in own_attentions(own_model(config))]
    assert turning == [True, True, True, False]


@pytest.mark.parametrize("model_type", sorted(KNOWN))
def test_every_family_s_defaults_alone_give_a_contract_or_name_the_missing_key(model_type: str) -> None:
    family = KNOWN[model_type]
    if family.transformers_has and model_type != "glm4_moe":
        contract = contract_from_config({"model_type": model_type}, cache=CacheChoice())
        assert contract.model.architecture == model_type
        assert contract.model.context_tokens == own_config({"model_type": model_type}).max_position_embeddings
        assert contract.layer_count() == own_config({"model_type": model_type}).num_hidden_layers
        return
    with pytest.raises(UnreadableSource, match=r"hidden_size|head_dim|num_hidden_layers"):
        contract_from_config({"model_type": model_type}, cache=CacheChoice())


@pytest.mark.parametrize("model_type", BUILT)
def test_the_config_that_transformers_writes_is_read_without_unknown_keys(model_type: str) -> None:
    written = own_config(_config(model_type)).to_dict()
    extra = {"per_layer_config", "head_dim", "qk_head_dim", "is_heterogeneous"}
    assert [key for key in unread_keys(_readable(written)) if key not in extra] == []


def _readable(written: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key != "per_layer_config"}


@pytest.mark.parametrize("model_type", sorted(set(BUILT) - {"gemma4_text", "deepseek_v2", "deepseek_v3"}))
def test_the_config_that_transformers_writes_means_what_it_was_made_from(model_type: str) -> None:
    config = _config(model_type)
    written = own_config(config).to_dict()
    again = contract_from_config(written, cache=CacheChoice())
    assert again == contract_from_config(config, cache=CacheChoice())


@pytest.mark.parametrize("model_type", BUILT)
def test_facts_of_a_family_s_function_have_the_defaults_of_its_config_class(model_type: str) -> None:
    own = own_config({"model_type": model_type})
    derived = {"moe_layers", "mlp_only_layers", "num_ln_in_parallel_attn"}
    for key, default in KNOWN[model_type].function_defaults.items():
        if key not in derived:
            assert getattr(own, key) == default, key


@pytest.mark.parametrize("model_type", BUILT)
def test_a_family_s_sizes_have_the_defaults_of_its_config_class(model_type: str) -> None:
    """Keys that the class works out from others, or that rotary settings carry, are compared elsewhere."""
    own = own_config({"model_type": model_type})
    elsewhere = {
        "rope_theta", "rope_local_base_freq", "head_dim", "layer_types", "no_rope_layers", "sliding_window",
        "sliding_window_pattern", "num_key_value_heads", "rotary_dim", "global_head_dim",
        "num_global_key_value_heads", "max_window_layers",
    }  # fmt: skip
    for key, default in KNOWN[model_type].defaults.items():
        if key not in elsewhere:
            assert getattr(own, key, False) == default, key
