"""Rotary tables equal transformers' own to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvpact.contract.rope import Llama3Scaling, RopeParameters, table_from_parameters

torch.set_num_threads(1)
THETAS = (10_000.0, 100_000, 130_000, 150_000, 500_000.0, 1_000_000, 2_000_000, 5_000_000.0, 10_000_000)
HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _transformers_table(head_dim: int, **rope: object) -> np.ndarray:
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=131_072,
        rope_parameters=rope,
    )  # fmt: skip
    return LlamaRotaryEmbedding(config).inv_freq.numpy()


@pytest.mark.parametrize("head_dim", [4, 16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("theta", THETAS)
def test_a_default_table_has_the_bits_of_transformers(head_dim: int, theta: float) -> None:
    table = table_from_parameters(RopeParameters(theta=theta, rotary_dim=head_dim))
    expected = _transformers_table(head_dim, rope_type="default", rope_theta=theta)
    ours = np.array(table.inv_freq, np.float32)
    if HAS_WIDE_VECTORS or head_dim % 64 == 0 or head_dim <= 16:
        assert ours.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_max_ulp(ours, expected, maxulp=1)
    assert table.amplitude == 1.0


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32, 1, 4, 8192), (3.7, 1.5, 4.2, 48)]
)
def test_a_llama3_table_has_the_bits_of_transformers(
    head_dim: int, factor: float, low: float, high: float, original: int
) -> None:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_context_tokens=original
    )
    expected = _transformers_table(
        head_dim, rope_type="llama3", rope_theta=500_000.0, factor=factor, low_freq_factor=low,
        high_freq_factor=high, original_max_position_embeddings=original,
    )  # fmt: skip
    table = table_from_parameters(RopeParameters(theta=500_000.0, rotary_dim=head_dim, scaling=scaling))
    assert np.array(table.inv_freq, np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("head_dim", "factor", "kept_end", "blended_end"), [(128, 8.0, 29, 35), (64, 32.0, 15, 18)]
)
def test_llama3_scaling_keeps_short_waves_blends_the_middle_and_divides_long_waves(
    head_dim: int, factor: float, kept_end: int, blended_end: int
) -> None:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
    )
    plain = np.array(table_from_parameters(RopeParameters(theta=5e5, rotary_dim=head_dim)).inv_freq)
    scaled = np.array(
        table_from_parameters(RopeParameters(theta=5e5, rotary_dim=head_dim, scaling=scaling)).inv_freq
    )
    ratio = plain / scaled
    assert np.all(ratio[:kept_end] == 1)
    assert np.all((ratio[kept_end:blended_end] > 1) & (ratio[kept_end:blended_end] < factor))
    np.testing.assert_allclose(ratio[blended_end:], factor, rtol=1e-6)
