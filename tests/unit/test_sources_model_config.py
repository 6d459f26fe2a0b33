"""One flat config out of nested ones and other spellings, and fields that are set inside them."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.families import FAMILIES, TEXT_TYPES
from kvpact.contract.sources.huggingface import contract_from_config, override_config, unread_keys
from kvpact.contract.sources.model_config import canonical_config
from kvpact.errors import BadRequest, UnreadableSource

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
GEMMA = SIZES | {"model_type": "gemma3_text", "sliding_window": 8}
NESTED = {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"hidden_size": 7}}
GPTJ = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _contract(config: dict[str, Any]) -> Any:
    return contract_from_config(config, cache=CacheChoice())


@pytest.mark.parametrize(
    "config",
    [
        GEMMA,
        NESTED,
        {"text_config": GEMMA},
        {"model_type": "gemma3", "text_config": {k: v for k, v in GEMMA.items() if k != "model_type"}},
        GEMMA | {"model_type": "gemma3"},
    ],
)
def test_a_text_part_is_the_same_model_wherever_it_lies(config: dict[str, Any]) -> None:
    assert _contract(config) == _contract(GEMMA)
    assert _contract(config).model.architecture == "gemma3_text"
    assert unread_keys(config) == ()


def test_a_flat_config_stays_as_it_is_and_flattening_twice_changes_nothing() -> None:
    flat = canonical_config(NESTED)
    assert flat == GEMMA
    assert canonical_config(flat) == flat
    assert canonical_config(canonical_config(GPTJ)) == canonical_config(GPTJ)


def test_a_tie_beside_the_text_part_counts_unless_the_part_says_otherwise() -> None:
    assert canonical_config(NESTED | {"tie_word_embeddings": False})["tie_word_embeddings"] is False
    inside = NESTED | {"text_config": GEMMA | {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    assert canonical_config(inside)["tie_word_embeddings"] is True


def test_every_text_type_is_a_known_family() -> None:
    assert set(TEXT_TYPES.values()) <= set(FAMILIES)


def test_an_alias_means_its_key_and_two_values_are_refused() -> None:
    spelled = {
        "model_type": "gptj", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 64, "rotary_dim": 8,
    }  # fmt: skip
    assert _contract(GPTJ) == _contract(spelled)
    assert _contract(GPTJ | spelled) == _contract(spelled)
    with pytest.raises(UnreadableSource, match="hidden_size is given twice") as refusal:
        _contract(GPTJ | {"hidden_size": 128})
    assert refusal.value.key == "hidden_size"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SIZES | {"model_type": "falcon", "alibi": True}, "alibi"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (SIZES | {"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (SIZES | {"model_type": "gemma2", "sliding_window_pattern": 4}, "sliding_window_pattern"),
        (SIZES | {"model_type": "gpt_neox"}, "num_key_value_heads"),
        (SIZES | {"model_type": "cohere2", "head_dim": 32}, "head_dim"),
        (SIZES | {"model_type": "cohere2", "sliding_window": None}, "sliding_window"),
        (SIZES | {"model_type": "mistral", "layer_types": ["full_attention"] * 6}, "layer_types[0]"),
        (SIZES | {"model_type": "exaone4", "sliding_window_pattern": "LLX"}, "sliding_window_pattern"),
        (SIZES | {"model_type": "granite", "attention_multiplier": 0}, "attention_multiplier"),
        (SIZES | {"model_type": "internlm2", "num_hidden_layers": None}, "num_hidden_layers"),
        (SIZES | {"model_type": "internlm2", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type"),
    ],
)
def test_what_a_family_doesnt_have_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        _contract(config)
    assert refusal.value.key == key


def test_a_pattern_in_letters_says_which_layers_slide() -> None:
    lettered = _contract(SIZES | {"model_type": "exaone4", "sliding_window_pattern": "LLG"})
    assert lettered == _contract(SIZES | {"model_type": "exaone4", "sliding_window_pattern": 3})


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False, "num_kv_heads": 2}, 2),
    ],
)
def test_kv_heads_of_falcon_come_from_its_attention(change: dict[str, Any], heads: int) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    assert _contract(sizes | {"model_type": "falcon"} | change).layer_groups[0].kv_heads == heads


def test_head_counts_of_latent_attention_must_agree() -> None:
    config = SIZES | {"model_type": "deepseek_v3"}
    with pytest.raises(UnreadableSource, match="num_key_value_heads: found 2, expected all 4 heads"):
        _contract(config)
    assert _contract(config | {"num_key_value_heads": 4}).layer_groups[0].kv_heads == 4


def test_global_layers_of_gemma_4_may_have_other_heads() -> None:
    config = SIZES | {
        "model_type": "gemma4_text", "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }  # fmt: skip
    windowed, full = _contract(config).layer_groups
    assert (windowed.layers, windowed.key_dim, windowed.kv_heads) == ((0, 1, 2, 3, 4), 16, 2)
    assert (full.layers, full.key_dim, full.kv_heads) == ((5,), 32, 1)
    assert _contract(config | {"attention_k_eq_v": False}).group_of(5).kv_heads == 2
    assert _contract(config).layout.shard.head_end == 2


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (NESTED, {"sliding_window": "16"}, NESTED | {"text_config": GEMMA | {"sliding_window": 16}}),
        (NESTED, {"rope_theta": "5e5"}, NESTED | {"text_config": GEMMA | {"rope_theta": 5e5}}),
        (GEMMA, {"rope_local_base_freq": 2e4}, GEMMA | {"rope_local_base_freq": 2e4}),
        (
            GEMMA | {"rope_parameters": BY_TYPE},
            {"rope_parameters.full_attention.rope_theta": "5e5"},
            GEMMA
            | {
                "rope_parameters": BY_TYPE
                | {"full_attention": BY_TYPE["full_attention"] | {"rope_theta": 5e5}}
            },
        ),
        (GPTJ, {"hidden_size": 128}, GPTJ | {"n_embd": 128}),
        (GPTJ, {"n_positions": 32}, GPTJ | {"n_positions": 32}),
        (GPTJ, {"rotary_dim": 4}, GPTJ | {"rotary_dim": 4}),
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.25},
            {"partial_rotary_factor": 0.5},
            {"model_type": "gpt_neox", "rotary_pct": 0.5},
        ),
        (
            {"model_type": "gpt_neox", "rotary_emb_base": 1e4},
            {"rope_theta": 5e5},
            {"model_type": "gpt_neox", "rotary_emb_base": 5e5},
        ),
    ],
)
def test_a_field_is_set_where_and_as_the_config_spells_it(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = repr(config)
    assert override_config(config, overrides) == expected
    assert repr(config) == before


def test_one_setting_for_a_config_with_two_is_refused_naming_the_way() -> None:
    with pytest.raises(BadRequest, match=r"write rope_parameters\.full_attention\.rope_theta"):
        override_config(GEMMA | {"rope_parameters": BY_TYPE}, {"rope_theta": 1e5})


def test_an_unknown_field_of_a_text_part_names_the_nearest() -> None:
    with pytest.raises(BadRequest, match="did you mean sliding_window"):
        override_config(NESTED, {"slidin_window": 3})
