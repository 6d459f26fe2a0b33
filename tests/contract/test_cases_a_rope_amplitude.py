"""Amplitudes and softmax scales: factors, attention_factor and mscale pairs that were dropped or misread."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.errors import UnreadableSource
from kvpact.types import VerdictWord
from tests.contract.own_families import FAMILIES, HEADS_16, own_attentions, own_model, own_rotary, own_table

torch.set_num_threads(1)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA: dict[str, Any] = HEADS_16 | {"model_type": "llama", "max_position_embeddings": 256, "rope_theta": 1e4}
LATENT: dict[str, Any] = FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3"}


def _contract(config: dict[str, Any], **scaling: Any) -> Contract:
    section = {"rope_scaling": YARN | scaling} if scaling else {}
    return contract_from_config(config | section, cache=CacheChoice())


def _group(config: dict[str, Any], **scaling: Any) -> LayerGroup:
    return _contract(config, **scaling).layer_groups[0]


def _amplitude(**scaling: Any) -> float:
    return _group(LLAMA, **scaling).rotary.tables[0].amplitude


def _fields(writer: Contract, reader: Contract) -> list[str]:
    verdict = compare(writer, reader, Policy(), 256)
    assert verdict.word is VerdictWord.REJECT
    return [difference.field for difference in verdict.differences]


def test_an_explicit_yarn_factor_holds_against_the_ratio_of_lengths(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        explicit = _contract(LLAMA, factor=4.0)
    assert "yarn factor 4.0 holds" in caplog.text
    ratio = _contract(LLAMA, factor=8.0)
    assert explicit.layer_groups[0].rotary.tables[0].inv_freq[-1] == pytest.approx(1e4 ** -(14 / 16) / 4)
    assert _contract(LLAMA, factor=None) == ratio
    assert set(_fields(ratio, explicit)) == {"inv_freq", "amplitude"}


def test_a_yarn_factor_that_fits_the_lengths_is_no_cause_for_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        _contract(LLAMA, factor=8.0)
        _contract(LLAMA | {"max_position_embeddings": 32}, factor=4.0)
    assert not caplog.text


def test_an_explicit_attention_factor_is_the_amplitude() -> None:
    assert _amplitude(attention_factor=1.0) == 1.0
    assert _amplitude(attention_factor=None) == pytest.approx(1.207944, abs=1e-6)
    given, derived = _contract(LLAMA, attention_factor=1.0), _contract(LLAMA, factor=8.0)
    assert _fields(given, derived) == ["amplitude"]


def test_an_attention_factor_equal_to_the_derived_one_makes_no_difference() -> None:
    derived = 0.1 * math.log(8) + 1
    writer, reader = _contract(LLAMA, attention_factor=derived), _contract(LLAMA, factor=8.0)
    assert compare(writer, reader, Policy(), 256).word is VerdictWord.ACCEPT


@pytest.mark.parametrize(
    ("pair", "amplitude"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({}, 1.277259),
        ({"mscale": 1.0}, 1.277259),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.277259),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.121751),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 2.0}, 2.0),
    ],
)
def test_the_mscale_pair_is_a_ratio_and_half_a_pair_counts_for_nothing(
    pair: dict[str, Any], amplitude: float
) -> None:
    assert _amplitude(factor=16.0, **pair) == pytest.approx(amplitude, abs=5e-6)
    own = own_rotary(LLAMA | {"rope_scaling": YARN | {"factor": 16.0} | pair})
    assert own_table(own)[1] == pytest.approx(amplitude, abs=5e-6)


def test_an_ignored_mscale_pair_is_refused_by_amplitude_alone() -> None:
    pair = _contract(LLAMA, factor=16.0, mscale=1.0, mscale_all_dim=1.0)
    assert _fields(pair, _contract(LLAMA, factor=16.0)) == ["amplitude"]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize(
    ("weight", "square"), [(1.0, 1.873854), (0.707, 1.589626), (0, 1.0), (None, 1.0), ("absent", 1.0)]
)
def test_latent_attention_takes_the_square_of_its_weight_into_the_softmax_scale(
    family: str, weight: Any, square: float
) -> None:
    pair = (
        {}
        if weight == "absent"
        else {"mscale": 0.707 if weight is None else weight, "mscale_all_dim": weight}
    )
    config = FAMILIES[family] | {"model_type": family}
    scaling = {"factor": 40.0} | pair
    group = _group(config, **scaling)
    assert group.softmax_scale == pytest.approx(24**-0.5 * square, rel=1e-6)
    assert group.rotary.tables[0].amplitude == pytest.approx(1.0 if square > 1 else 0.1 * math.log(40) + 1)
    own = own_attentions(own_model(config | {"rope_scaling": YARN | scaling}))[0]
    assert group.softmax_scale == own.scaling


def test_a_softmax_scale_without_the_square_is_refused_by_that_field_alone() -> None:
    full = _contract(LATENT, factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    missing = _contract(LATENT, factor=40.0, attention_factor=1.0)
    assert _fields(full, missing) == ["softmax_scale"]


def test_plain_latent_attention_has_no_weight() -> None:
    plain = LATENT | {"rope_scaling": {"rope_type": "default", "mscale_all_dim": 1.0}}
    assert _group(plain).softmax_scale == 24**-0.5


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("factor", "original", "fast", "slow"), [(8, 32, 32, 1), (4, 64, 2.5, 0.5), (40, 16, 0, 0)]
)
def test_a_yarn_table_is_transformers_own(
    truncate: bool, factor: float, original: int, fast: float, slow: float
) -> None:
    scaling = {
        "factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow,
        "truncate": truncate,
    }  # fmt: skip
    inv_freq, amplitude = own_table(own_rotary(LLAMA | {"rope_scaling": YARN | scaling}))
    table = _group(LLAMA, **scaling).rotary.tables[0]
    np.testing.assert_array_max_ulp(np.float32(table.inv_freq), inv_freq, maxulp=1)
    assert table.amplitude == amplitude


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"factor": 0.5}, "factor"),
        ({"factor": "8"}, "factor"),
        ({"attention_factor": 0}, "attention_factor"),
        ({"attention_factor": -1.0}, "attention_factor"),
        ({"attention_factor": float("nan")}, "attention_factor"),
        ({"mscale_all_dim": -1.0}, "mscale_all_dim"),
        ({"mscale": "1"}, "mscale"),
        ({"beta_fast": 0.5}, "beta_fast"),
        ({"beta_slow": "1"}, "beta_slow"),
        ({"truncate": "no"}, "truncate"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 32.5}, "original_max_position_embeddings"),
    ],
)
def test_a_yarn_number_that_cant_be_used_is_refused_by_its_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UnreadableSource) as refusal:
        _contract(LLAMA, **change)
    assert refusal.value.key == key


def test_a_yarn_factor_that_is_absent_is_refused_and_not_derived() -> None:
    scaling = {key: value for key, value in YARN.items() if key != "factor"}
    with pytest.raises(UnreadableSource, match="factor: found None"):
        contract_from_config(LLAMA | {"rope_scaling": scaling}, cache=CacheChoice())


@pytest.mark.parametrize(
    ("family", "settings", "scale"),
    [
        ("granite", {"attention_multiplier": 0.015625}, 0.015625),
        ("gemma2", {"query_pre_attn_scalar": 144}, 1 / 12),
        ("gemma4_text", {}, 1.0),
    ],
)
def test_a_scale_of_the_family_s_own_kind(family: str, settings: dict[str, Any], scale: float) -> None:
    config = FAMILIES[family] | {"model_type": family} | settings
    assert _group(config).softmax_scale == pytest.approx(scale)


def test_a_null_softcap_is_none_and_an_absent_one_the_family_s_own() -> None:
    config = FAMILIES["gemma2"] | {"model_type": "gemma2"}
    assert _group(config).softcap == 50.0
    assert _group(config | {"attn_logit_softcapping": None}).softcap is None
    with pytest.raises(UnreadableSource, match="attn_logit_softcapping"):
        _group(config | {"attn_logit_softcapping": 0})
    with pytest.raises(UnreadableSource, match="attn_logit_softcapping"):
        _group(FAMILIES["gemma3_text"] | {"model_type": "gemma3_text", "attn_logit_softcapping": 30.0})


def test_ministral_turns_up_queries_by_position() -> None:
    config = FAMILIES["ministral3"] | {"model_type": "ministral3"}
    temperature = _group(config).temperature
    assert temperature is not None
    assert (temperature.formula, temperature.parameters) == ("ministral3_log", (16384.0, 0.1))
    with pytest.raises(UnreadableSource, match="llama_4_scaling_beta"):
        _group(config | {"rope_parameters": YARN})
