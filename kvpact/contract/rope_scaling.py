"""Kinds of rotary scaling as numbers, with the amplitudes and ramps that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: theta grows with lengths above `context_tokens`, so each such length has its own table."""

    factor: float
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Numbers of llama3 scaling: it stretches long waves by `factor`, keeps short ones, blends between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: as llama3 with another ramp, and an amplitude. `truncate` rounds the ramp's ends outwards."""

    factor: float
    original_context_tokens: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongropeScaling:
    """One divisor per frequency: short ones up to and at the original context, long ones above it."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_tokens: int
    amplitude: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """The first `proportion` of the pairs turns; pairs are as far apart as if all did."""

    proportion: float
    factor: float = 1.0


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongropeScaling | ProportionalScaling


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 * weight * ln(factor) + 1, and 1 for factors up to 1 (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_amplitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Amplitude where none is given: a ratio if both weights are there and not 0, else that of `factor`."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def longrope_amplitude(factor: float, original_context_tokens: int) -> float:
    """sqrt(1 + ln(factor) / ln(original)), and 1 for factors up to 1 (LongRoPE)."""
    if factor <= 1 or original_context_tokens <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_tokens))


def yarn_ramp(scaling: YarnScaling, *, theta: float, rotary_dim: int) -> tuple[float, float]:
    """Pairs, as real numbers, between which YaRN goes from keeping frequencies to dividing them."""

    def pair(turns: float) -> float:
        waves = scaling.original_context_tokens / (turns * 2 * math.pi)
        return rotary_dim * math.log(waves) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high + 0.001 if low == high else high
