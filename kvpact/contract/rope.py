"""Rotary tables from their parameters, in float32 as transformers computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.contract import RotaryTable
from kvpact.contract.power32 import power32

KNOWN_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Numbers of llama3 scaling: it stretches long waves by `factor`, keeps short ones, blends between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """What a table is made from. `scaling` None is the default type."""

    theta: float
    rotary_dim: int
    scaling: Llama3Scaling | None = None


def table_from_parameters(parameters: RopeParameters) -> RotaryTable:
    """The table that runs: rotary_dim / 2 inverse frequencies in radians per position, amplitude 1."""
    inv_freq = _plain(parameters.theta, parameters.rotary_dim)
    if parameters.scaling is not None:
        inv_freq = _stretch(inv_freq, parameters.scaling)
    return RotaryTable(inv_freq=tuple(float(value) for value in inv_freq), amplitude=1.0)


def _plain(theta: float, rotary_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(1) / power32(theta, exponents)


def _stretch(inv_freq: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    one, factor = np.float32(1), np.float32(scaling.factor)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = (one / inv_freq) * np.float32(2 * math.pi)
    too_long = wavelength > np.float32(scaling.original_context_tokens / low)
    too_short = wavelength < np.float32(scaling.original_context_tokens / high)
    stretched = np.where(too_long, inv_freq / factor, inv_freq)
    turns = (one / wavelength) * np.float32(scaling.original_context_tokens)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (one - blend) * stretched / factor + blend * stretched
    return np.where(~too_long & ~too_short, blended, stretched)
