"""Scaled rotary tables: bits of transformers, and amplitudes and ramps worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvpact.contract.contract import FrequencyFormula
from kvpact.contract.rope import (
    DynamicScaling,
    LinearScaling,
    LongropeScaling,
    ProportionalScaling,
    RopeParameters,
    Scaling,
    YarnScaling,
    formula_table,
    frequencies_of,
    table_from_parameters,
)
from kvpact.contract.rope_scaling import longrope_amplitude, yarn_amplitude, yarn_mscale, yarn_ramp
from kvpact.types import FrequencyPolicy

torch.set_num_threads(1)
THETA, WIDTH = 500_000.0, 128
HALF = WIDTH // 2
RISING = tuple(1 + i / 7 for i in range(HALF))
STEEP = tuple(2 + i * i / 3 for i in range(HALF))


def _own(**rope: Any) -> Any:
    config = LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, head_dim=WIDTH, max_position_embeddings=4096,
        rope_parameters={"rope_theta": THETA} | rope,
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


def _table(scaling: Scaling, length: int = 1) -> np.ndarray:
    parameters = RopeParameters(theta=THETA, rotary_dim=WIDTH, scaling=scaling)
    return np.float32(table_from_parameters(parameters, length).inv_freq)


@pytest.mark.parametrize("factor", [1.0, 3.0, 8, 2.7])
def test_a_linear_table_has_the_bits_of_transformers(factor: float) -> None:
    own = _own(rope_type="linear", factor=factor).inv_freq.numpy()
    assert _table(LinearScaling(factor=factor)).tobytes() == own.tobytes()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.3])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_proportional_table_has_the_numbers_of_transformers(share: float, factor: float) -> None:
    own = _own(rope_type="proportional", partial_rotary_factor=share, factor=factor).inv_freq.numpy()
    ours = _table(ProportionalScaling(proportion=share, factor=factor))
    np.testing.assert_array_max_ulp(ours, own, maxulp=1)
    turning = int(share * WIDTH // 2)
    assert np.all(ours[:turning] > 0)
    assert not ours[turning:].any()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("factor", "original"), [(4.0, 1024), (32.0, 4096), (1.0, 4096), (40, 128)])
def test_a_yarn_table_has_the_bits_of_transformers(truncate: bool, factor: float, original: int) -> None:
    own = _own(
        rope_type="yarn", factor=factor, original_max_position_embeddings=original, truncate=truncate
    )  # fmt: skip
    scaling = YarnScaling(
        factor=factor, original_context_tokens=original, amplitude=yarn_amplitude(factor, None, None),
        truncate=truncate,
    )  # fmt: skip
    assert _table(scaling).tobytes() == own.inv_freq.numpy().tobytes()
    assert scaling.amplitude == own.attention_scaling


@pytest.mark.parametrize(("length", "factors"), [(1, RISING), (1024, RISING), (1025, STEEP), (4096, STEEP)])
def test_a_longrope_table_has_the_bits_of_transformers(length: int, factors: tuple[float, ...]) -> None:
    own = _own(
        rope_type="longrope", short_factor=list(RISING), long_factor=list(STEEP),
        original_max_position_embeddings=1024,
    )  # fmt: skip
    own(torch.zeros(1), torch.tensor([[length - 1]]))
    scaling = LongropeScaling(
        short_factors=RISING, long_factors=STEEP, original_context_tokens=1024,
        amplitude=longrope_amplitude(4.0, 1024),
    )  # fmt: skip
    assert _table(scaling, length).tobytes() == own.inv_freq.numpy().tobytes()
    assert scaling.amplitude == own.attention_scaling
    expected = 1 / (np.array(factors) * THETA ** (np.arange(HALF) / HALF))
    np.testing.assert_allclose(_table(scaling, length), expected, rtol=1e-6)


def test_longrope_has_two_tables_and_dynamic_one_and_a_formula() -> None:
    longrope = LongropeScaling(
        short_factors=RISING, long_factors=STEEP, original_context_tokens=1024, amplitude=1.5
    )
    found = frequencies_of(RopeParameters(theta=THETA, rotary_dim=WIDTH, scaling=longrope))
    assert [(table.upper_length, table.amplitude) for table in found.tables] == [(1024, 1.5), (None, 1.5)]
    assert (found.policy, found.formula) == (FrequencyPolicy.BY_REQUEST_LENGTH, None)
    dynamic = DynamicScaling(factor=2.0, context_tokens=64)
    found = frequencies_of(RopeParameters(theta=THETA, rotary_dim=WIDTH, scaling=dynamic))
    assert [table.upper_length for table in found.tables] == [64]
    assert found.policy is FrequencyPolicy.BY_REQUEST_LENGTH
    assert found.formula == FrequencyFormula(name="dynamic_ntk", parameters=(THETA, 128.0, 2.0, 64.0))


@pytest.mark.parametrize("length", [65, 100, 128, 4096])
def test_a_formula_s_table_is_that_of_a_stretched_theta(length: int) -> None:
    scaling = DynamicScaling(factor=2.0, context_tokens=64)
    theta = THETA * (2 * length / 64 - 1) ** (128 / 126)
    np.testing.assert_allclose(_table(scaling, length), theta ** -(np.arange(HALF) / HALF), rtol=1e-6)
    plain = frequencies_of(RopeParameters(theta=THETA, rotary_dim=WIDTH)).tables[0].inv_freq
    assert tuple(_table(scaling, 64).tolist()) == plain


@pytest.mark.parametrize(("name", "count"), [("other_ntk", 4), ("dynamic_ntk", 3), ("dynamic_ntk", 5)])
def test_a_formula_that_isnt_known_is_refused(name: str, count: int) -> None:
    with pytest.raises(ValueError, match="isn't known"):
        formula_table(FrequencyFormula(name=name, parameters=(1.0,) * count), 10)


@pytest.mark.parametrize(
    ("factor", "pair", "amplitude"),
    [
        (4.0, (None, None), 1.138629),
        (32.0, (None, None), 1.346574),
        (8.0, (None, None), 1.207944),
        (16.0, (None, 1.0), 1.277259),
        (16.0, (1.0, 1.0), 1.0),
        (1.0, (None, None), 1.0),
        (0.5, (None, None), 1.0),
    ],
)
def test_amplitudes_of_yarn(factor: float, pair: tuple[float | None, float | None], amplitude: float) -> None:
    assert yarn_amplitude(factor, *pair) == pytest.approx(amplitude, abs=1e-6)


def test_squares_of_yarn_s_weight() -> None:
    assert yarn_mscale(40, 1.0) ** 2 == pytest.approx(1.873854, abs=1e-6)
    assert yarn_mscale(40, 0.707) ** 2 == pytest.approx(1.589626, abs=1e-6)


def test_amplitudes_of_longrope() -> None:
    assert longrope_amplitude(32, 4096) == pytest.approx(1.190238, abs=1e-6)
    assert longrope_amplitude(1.0, 4096) == 1.0
    assert longrope_amplitude(2.0, 1) == 1.0


@pytest.mark.parametrize(
    ("theta", "width", "original", "low", "high"),
    [(1e6, 128, 32_768, 23.596, 39.651), (150_000, 64, 4096, 8.092779, 17.398025)],
)
def test_ends_of_yarn_s_ramp(theta: float, width: int, original: int, low: float, high: float) -> None:
    def ramp(truncate: bool) -> tuple[float, float]:
        scaling = YarnScaling(factor=4.0, original_context_tokens=original, amplitude=1.0, truncate=truncate)
        return yarn_ramp(scaling, theta=theta, rotary_dim=width)

    assert ramp(False) == pytest.approx((low, high), abs=1e-3)
    assert ramp(True) == (math.floor(low), math.ceil(high))


def test_a_ramp_without_width_still_has_two_ends() -> None:
    scaling = YarnScaling(factor=4.0, original_context_tokens=6, amplitude=1.0)
    assert yarn_ramp(scaling, theta=1e4, rotary_dim=16) == (0, 0.001)
