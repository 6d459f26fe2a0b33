"""Theta, type and precision: a default taken for everyone, a name that one family alone knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotation_at
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import VerdictWord
from tests.contract.own_families import FAMILIES, HEADS_16, own_rotary, own_table
from tests.factories import make_contract, make_rotary, with_rotary

torch.set_num_threads(1)
DEFAULT_THETAS = {
    "llama": 1e4, "cohere": 5e5, "cohere2": 1e4, "gpt_oss": 1.5e5, "smollm3": 2e6, "minimax_m2": 5e6,
    "qwen2_vl_text": 1e6, "qwen2_5_vl_text": 1e6, "qwen3_vl_text": 5e5, "llama4_text": 5e5, "olmo3": 5e5,
    "ministral3": 1e6, "mistral": 1e4, "gemma3_text": 1e4, "gptj": 1e4, "falcon": 1e4,
}  # fmt: skip
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _contract(model_type: str, **rope: Any) -> Contract:
    config = FAMILIES[model_type] | {"model_type": model_type} | rope
    return contract_from_config(config, cache=CacheChoice())


def _last(contract: Contract) -> tuple[float, int]:
    rotary = contract.group_of(0).rotary
    return rotary.tables[0].inv_freq[-1], rotary.rotary_dim


@pytest.mark.parametrize("model_type", sorted(DEFAULT_THETAS))
def test_a_theta_absent_everywhere_is_the_architecture_s_own(model_type: str) -> None:
    last, width = _last(_contract(model_type))
    factor = {"gpt_oss": 32.0, "ministral3": 16.0}.get(model_type, 1.0)
    assert last == pytest.approx(DEFAULT_THETAS[model_type] ** -((width - 2) / width) / factor, rel=1e-6)


@pytest.mark.parametrize("model_type", ["cohere", "gpt_oss", "smollm3", "minimax_m2"])
def test_no_family_falls_back_to_everyone_s_ten_thousand(model_type: str) -> None:
    assert _last(_contract(model_type)) != _last(_contract(model_type, rope_theta=1e4))


def test_an_own_default_section_holds_only_where_there_is_none() -> None:
    plain = _contract("gpt_oss", rope_parameters={"rope_type": "default"})
    assert plain.group_of(0).rotary.tables[0].amplitude == 1.0
    assert _contract("gpt_oss", rope_scaling=None) == _contract("gpt_oss")
    with pytest.raises(UnreadableSource, match=r"ministral3's own default\.rope_theta = 1000000\.0"):
        _contract("ministral3", rope_theta=5e5)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("gpt_neox", "rotary_emb_base"), ("gpt_neox", "rope_theta"), ("llama", "rope_theta")],
)
def test_theta_under_the_family_s_own_name(model_type: str, key: str) -> None:
    last, width = _last(_contract(model_type, **{key: 5e5}))
    assert last == pytest.approx(5e5 ** -((width - 2) / width), rel=1e-6)


def test_two_names_of_theta_with_two_values_are_refused() -> None:
    with pytest.raises(UnreadableSource, match="rope_theta is given twice"):
        _contract("gpt_neox", rotary_emb_base=1e4, rope_theta=5e5)


def test_a_family_without_a_theta_of_its_own_refuses_another() -> None:
    assert _contract("gptj", rope_theta=10_000) == _contract("gptj")
    with pytest.raises(UnreadableSource, match=r"rope_theta: found 500000\.0"):
        _contract("gptj", rope_theta=5e5)


def test_a_rope_ratio_multiplies_theta() -> None:
    config = {
        "model_type": "chatglm", "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16,
        "num_layers": 1, "seq_length": 128, "original_rope": True, "multi_query_attention": True,
        "multi_query_group_num": 2, "rope_ratio": 500,
    }  # fmt: skip
    inv_freq, width = _last(contract_from_config(config, cache=CacheChoice()))
    assert (width, inv_freq) == (8, pytest.approx(5e6 ** -(6 / 8), rel=1e-6))
    for change, key in (
        ({"rope_ratio": 0}, "rope_ratio"),
        ({"original_rope": False}, "original_rope"),
        ({"multi_query_group_num": None}, "multi_query_group_num"),
        ({"kv_channels": 15}, "head_dim"),
        ({"num_layers": None}, "num_hidden_layers"),
    ):
        with pytest.raises(UnreadableSource) as refusal:
            contract_from_config(config | change, cache=CacheChoice())
        assert refusal.value.key == key


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_su_and_yarn_mean_longrope_in_phi3_alone(name: str, key: str) -> None:
    phi3 = {"original_max_position_embeddings": 64, "rope_scaling": LISTS | {key: name}}
    assert _contract("phi3", **phi3) == _contract(
        "phi3", **phi3 | {"rope_scaling": LISTS | {"rope_type": "longrope"}}
    )
    with pytest.raises(UnreadableSource):
        _contract("llama", rope_scaling=LISTS | {key: "su"})


def test_phi3_takes_its_original_length_from_the_top_level() -> None:
    inside = LISTS | {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert _contract("phi3", rope_scaling=inside, original_max_position_embeddings=64)
    with pytest.raises(UnreadableSource, match="original_max_position_embeddings is given twice"):
        _contract("phi3", rope_scaling=inside)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3"])
def test_phi3_knows_longrope_and_no_other_scaling(rope_type: str) -> None:
    with pytest.raises(UnreadableSource, match="known are default, longrope, su, yarn"):
        _contract("phi3", rope_scaling={"type": rope_type, "factor": 2.0})


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"])
def test_mrope_is_the_default_type_of_the_families_that_have_it(model_type: str) -> None:
    sections = FAMILIES[model_type]["rope_scaling"] | {"type": "mrope"}
    sections.pop("rope_type", None)
    named = _contract(model_type, rope_scaling=sections)
    assert named == _contract(model_type, rope_scaling=sections | {"rope_type": "default"})
    with pytest.raises(UnreadableSource, match="'mrope' isn't known"):
        _contract("qwen2", rope_scaling=sections)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        LISTS | {"rope_type": "longrope", "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4_moe", "glm"])
def test_every_rope_type_has_the_numbers_of_transformers(model_type: str, scaling: dict[str, Any]) -> None:
    partial = model_type.startswith("glm") and scaling["rope_type"] != "proportional"
    if partial and scaling["rope_type"] == "longrope":
        scaling = scaling | {"short_factor": [1.5] * 4, "long_factor": [2.0] * 4}
    config = HEADS_16 | FAMILIES[model_type] | {"model_type": model_type, "rope_scaling": scaling}
    inv_freq, amplitude = own_table(own_rotary(config))
    rotary = contract_from_config(config, cache=CacheChoice()).layer_groups[0].rotary
    assert rotary.rotary_dim == (8 if partial else 16)
    np.testing.assert_array_max_ulp(np.float32(rotary.tables[0].inv_freq), inv_freq, maxulp=1)
    assert rotary.tables[0].amplitude == pytest.approx(amplitude, rel=1e-7)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "dynamic", "factor": None}, "factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        (LISTS | {"rope_type": "longrope", "short_factor": "all"}, "short_factor"),
        (LISTS | {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0]}, "short_factor[7]"),
        (LISTS | {"rope_type": "longrope", "attention_factor": -1}, "attention_factor"),
        ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
)
def test_a_scaling_number_that_is_absent_or_wrong_is_refused(scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        _contract("llama", rope_scaling=scaling)
    assert refusal.value.key == key


def test_angles_are_float32_where_halves_would_lose_the_turn() -> None:
    rotary = contract_from_config(
        FAMILIES["llama"] | {"model_type": "llama", "head_dim": 32}, cache=CacheChoice()
    ).layer_groups[0].rotary  # fmt: skip
    angle = 1857 * rotary.tables[0].inv_freq[1]
    assert angle == pytest.approx(1044.2678, abs=1e-3)
    halved = float(np.float16(1857) * np.float16(rotary.tables[0].inv_freq[1]))
    assert halved == 1045.0
    assert abs(np.cos(angle) - np.cos(halved)) == pytest.approx(0.71, abs=0.01)
    turned = rotation_at(rotary, rotary.tables[0], torch.tensor([1857]))
    assert float(turned.cos[0, 0, 1]) == pytest.approx(np.cos(angle), abs=1e-4)


@pytest.mark.parametrize("position", [257, 32_769, 100_001, 131_071])
def test_positions_are_integers_that_float32_holds_and_bfloat16_doesnt(position: int) -> None:
    assert int(torch.tensor(float(position))) == position
    assert int(torch.tensor(float(position), dtype=torch.bfloat16)) != position
    rotary = make_rotary()
    with pytest.raises(TypeError, match="integers"):
        rotation_at(rotary, rotary.tables[0], torch.tensor([float(position)], dtype=torch.bfloat16))


def test_a_table_of_bfloat16_numbers_is_another_table() -> None:
    table = make_rotary().tables[0]
    halves = tuple(torch.tensor(table.inv_freq, dtype=torch.bfloat16).float().tolist())
    shipped = with_rotary(make_contract(), tables=(replace(table, inv_freq=halves),))
    verdict = compare(shipped, make_contract(), Policy(), 4096)
    assert verdict.word is VerdictWord.REJECT
    assert [difference.field for difference in verdict.differences] == ["inv_freq"]


def test_a_table_of_numbers_that_arent_float32_is_no_table() -> None:
    wide = replace(make_rotary().tables[0], inv_freq=(0.1,) * 8)
    with pytest.raises(BadRequest, match="a float32 number"):
        validate_contract(with_rotary(make_contract(), tables=(wide,)))
