"""Spellings of rotary settings: a theta that silently became 10000, llama3 scaling that was never used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.errors import UnreadableSource
from kvpact.types import KeyState, VerdictWord

torch.set_num_threads(1)
BASE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}
FAMILIES = ("llama", "qwen3")
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _contract(model_type: str, key_state: KeyState = KeyState.ROTATED, **rope: Any) -> Contract:
    config = BASE | {"model_type": model_type} | rope
    return contract_from_config(config, cache=CacheChoice(key_state=key_state))


def _own_table(model_type: str, **rope: Any) -> np.ndarray:
    config = AutoConfig.for_model(model_type, **BASE, **rope)
    return LlamaRotaryEmbedding(config).inv_freq.numpy()


def _bits(contract: Contract) -> bytes:
    return np.array(contract.layer_groups[0].rotary.tables[0].inv_freq, np.float32).tobytes()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500_000.0},
        {"rope_theta": 500_000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default", "type": "default"}},
        {"rope_theta": 500_000, "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 500_000.0, "type": "default"}},
    ],
)
def test_theta_means_the_same_wherever_it_is_written(model_type: str, spelling: dict[str, Any]) -> None:
    contract = _contract(model_type, **spelling)
    assert contract == _contract(model_type, rope_theta=500_000.0)
    assert _bits(contract) == _own_table(model_type, **spelling).tobytes()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_an_absent_theta_is_the_architecture_s_own(model_type: str, rope: dict[str, Any]) -> None:
    assert _bits(_contract(model_type, **rope)) == _own_table(model_type, **rope).tobytes()


@pytest.mark.parametrize(
    "theta", [0, 0.0, -10_000.0, float("nan"), float("inf"), 1e39, "500000", None, True, [1]]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_theta_that_is_no_positive_number_is_refused(theta: object, nested: bool) -> None:
    rope = {"rope_parameters": {"rope_theta": theta}} if nested else {"rope_theta": theta}
    with pytest.raises(UnreadableSource) as refusal:
        _contract("llama", **rope)
    assert refusal.value.key == "rope_theta"
    assert repr(theta) in str(refusal.value)


def test_two_different_thetas_are_refused_with_both_values() -> None:
    with pytest.raises(
        UnreadableSource, match=r"rope_theta = 10000\.0, rope_parameters\.rope_theta = 500000\.0"
    ):
        _contract("llama", rope_theta=10_000.0, rope_parameters={"rope_theta": 500_000.0})


@pytest.mark.parametrize("key_state", [KeyState.RAW, KeyState.ROTATED])
def test_a_different_theta_is_one_refused_difference_named_inv_freq(key_state: KeyState) -> None:
    writer = _contract("llama", key_state, rope_theta=500_000.0)
    reader = _contract("llama", key_state, rope_theta=10_000.0)
    verdict = compare(writer, reader, Policy(), 4096)
    assert verdict.word is VerdictWord.REJECT
    assert [difference.field for difference in verdict.differences] == ["inv_freq"]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_the_type_means_the_same_under_either_name(
    model_type: str, keys: tuple[str, ...], section: str
) -> None:
    scaling = LLAMA3 | dict.fromkeys(keys, "llama3")
    contract = _contract(model_type, rope_theta=500_000.0, **{section: scaling})
    assert contract == _contract(
        model_type, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 500_000.0}
    )
    own = _own_table(model_type, rope_theta=500_000.0, **{section: dict(scaling)})
    assert _bits(contract) == own.tobytes()


def test_two_different_types_are_refused_with_both_values() -> None:
    with pytest.raises(UnreadableSource, match=r"'linear'.*'yarn'"):
        _contract("llama", rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0})


@pytest.mark.parametrize("rope_type", ["foo", "su", "mrope", None, 3, ""])
def test_an_unknown_type_is_refused_by_name(rope_type: object) -> None:
    with pytest.raises(UnreadableSource, match=r"known are default, .*llama3") as refusal:
        _contract("llama", rope_scaling={"rope_type": rope_type, "factor": 2.0})
    assert repr(rope_type) in str(refusal.value)


def test_a_factor_without_a_type_is_refused_instead_of_dropped() -> None:
    with pytest.raises(UnreadableSource, match="since factor is given"):
        _contract("llama", rope_scaling={"factor": 8.0})


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", ["absent", None, 0, -1.0, float("nan"), "8"])
def test_a_llama3_number_that_is_absent_or_wrong_is_refused(key: str, value: object) -> None:
    scaling: dict[str, Any] = LLAMA3 | {"rope_type": "llama3", key: value}
    if value == "absent":
        del scaling[key]
    with pytest.raises(UnreadableSource, match=key):
        _contract("llama", rope_scaling=scaling)


def test_llama3_bounds_that_cross_are_refused() -> None:
    with pytest.raises(UnreadableSource, match="more than low_freq_factor"):
        _contract("llama", rope_scaling=LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0})


def test_an_absent_original_length_is_the_model_s_own() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    rope = {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}}
    assert _bits(_contract("llama", **rope)) == _own_table("llama", **rope).tobytes()


@pytest.mark.parametrize("context", [4096, 131_072])
def test_scaling_on_one_side_only_is_refused_when_two_sides_pair(context: int) -> None:
    """At pairing the whole context counts, so a prompt of 8 tokens is refused as one of 4096 is."""
    scaled = _contract("llama", rope_theta=5e5, rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    plain = _contract("llama", rope_theta=5e5)
    for writer, reader in ((scaled, plain), (plain, scaled)):
        verdict = compare(writer, reader, Policy(), context)
        assert verdict.word is VerdictWord.REJECT
        assert [difference.field for difference in verdict.differences] == ["inv_freq"]
