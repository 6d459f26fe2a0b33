"""Rotary tables from their parameters, in float32 as transformers computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.contract import FrequencyFormula, RotaryTable
from kvpact.contract.power32 import power32
from kvpact.contract.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
    yarn_ramp,
)
from kvpact.types import FrequencyPolicy

__all__ = [
    "DYNAMIC_FORMULA",
    "KNOWN_ROPE_TYPES",
    "DynamicScaling",
    "Frequencies",
    "LinearScaling",
    "Llama3Scaling",
    "LongropeScaling",
    "ProportionalScaling",
    "RopeParameters",
    "Scaling",
    "YarnScaling",
    "formula_table",
    "frequencies_of",
    "table_from_parameters",
]

KNOWN_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
WIDEST_HEAD = 65_536
LARGEST_LOG_THETA = math.log(float(np.finfo(np.float32).max))
DYNAMIC_FORMULA = "dynamic_ntk"
"""Formula with parameters (theta, rotary_dim, factor, context_tokens): lengths above context_tokens stretch
theta by (factor * length / context_tokens - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """What tables are made from. `scaling` None is the default type."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """Every table of one set of parameters, and how a request gets its own."""

    policy: FrequencyPolicy
    tables: tuple[RotaryTable, ...]
    formula: FrequencyFormula | None = None


def frequencies_of(parameters: RopeParameters) -> Frequencies:
    """Tables by length: one, two for longrope, one and a formula for dynamic scaling.

    Parameters beyond float32 give frequencies that aren't finite, which no contract may have.
    """
    with np.errstate(all="ignore"):
        return _frequencies(parameters)


def _frequencies(parameters: RopeParameters) -> Frequencies:
    scaling = parameters.scaling
    if isinstance(scaling, DynamicScaling):
        numbers = (parameters.theta, float(parameters.rotary_dim), scaling.factor)
        return Frequencies(
            policy=FrequencyPolicy.BY_REQUEST_LENGTH,
            tables=(_table(_plain(parameters), upper_length=scaling.context_tokens),),
            formula=FrequencyFormula(
                name=DYNAMIC_FORMULA, parameters=(*numbers, float(scaling.context_tokens))
            ),
        )
    if isinstance(scaling, LongropeScaling):
        last_short = scaling.original_context_tokens
        short, long = (_longrope(parameters, part) for part in (scaling.short_factors, scaling.long_factors))
        return Frequencies(
            policy=FrequencyPolicy.BY_REQUEST_LENGTH,
            tables=(_table(short, scaling.amplitude, last_short), _table(long, scaling.amplitude)),
        )
    return Frequencies(policy=FrequencyPolicy.FROZEN, tables=(_frozen_table(parameters),))


def table_from_parameters(parameters: RopeParameters, length: int = 1) -> RotaryTable:
    """The table of a request of `length` tokens: rotary_dim / 2 frequencies in radians per position."""
    frequencies = frequencies_of(parameters)
    for table in frequencies.tables:
        if table.upper_length is None or length <= table.upper_length:
            return table
    assert frequencies.formula is not None
    return formula_table(frequencies.formula, length)


@lru_cache(maxsize=256)
def formula_table(formula: FrequencyFormula, length: int) -> RotaryTable:
    """The table that `formula` gives a request of `length` tokens; its upper length is that length.

    Raises:
        ValueError: a formula that isn't known, or parameters that give no table.
    """
    if formula.name != DYNAMIC_FORMULA or len(formula.parameters) != 4:
        raise ValueError(f"formula {formula.name!r} with {len(formula.parameters)} parameters isn't known")
    theta, rotary_dim, factor, context = formula.parameters
    usable = theta > 0 and rotary_dim >= 4 and rotary_dim % 2 == 0 and factor >= 1 and context >= 1
    if not usable or rotary_dim > WIDEST_HEAD:
        raise ValueError(f"formula {formula.name!r} gives no table for {formula.parameters}")
    stretch = factor * (max(length, context) / context) - (factor - 1)
    exponent = rotary_dim / (rotary_dim - 2)
    if math.log(theta) + exponent * math.log(max(stretch, 1)) >= LARGEST_LOG_THETA:
        raise ValueError(f"formula {formula.name!r} has no float32 theta for {length} tokens")
    theta *= stretch**exponent
    inv_freq = _plain(RopeParameters(theta=theta, rotary_dim=int(rotary_dim)))
    return _table(inv_freq, upper_length=max(length, int(context)))


def _frozen_table(parameters: RopeParameters) -> RotaryTable:
    scaling = parameters.scaling
    if isinstance(scaling, ProportionalScaling):
        return _table(_proportional(parameters, scaling))
    if isinstance(scaling, YarnScaling):
        return _table(_yarn(parameters, scaling), scaling.amplitude)
    inv_freq = _plain(parameters)
    if isinstance(scaling, LinearScaling):
        inv_freq = inv_freq / np.float32(scaling.factor)
    if isinstance(scaling, Llama3Scaling):
        inv_freq = _llama3(inv_freq, scaling)
    return _table(inv_freq)


def _table(
    inv_freq: NDArray[np.float32], amplitude: float = 1.0, upper_length: int | None = None
) -> RotaryTable:
    numbers = tuple(float(value) for value in inv_freq)
    return RotaryTable(inv_freq=numbers, amplitude=amplitude, upper_length=upper_length)


def _powers(theta: float, count: int, width: int) -> NDArray[np.float32]:
    """theta ** (2 i / width) for the first `count` pairs."""
    return power32(theta, np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(width))


def _plain(parameters: RopeParameters) -> NDArray[np.float32]:
    return np.float32(1) / _powers(parameters.theta, parameters.rotary_dim // 2, parameters.rotary_dim)


def _proportional(parameters: RopeParameters, scaling: ProportionalScaling) -> NDArray[np.float32]:
    """Frequencies of the whole head's width for the first pairs, and pairs that don't turn behind them."""
    pairs = parameters.rotary_dim // 2
    turning = int(scaling.proportion * parameters.rotary_dim // 2)
    inv_freq = np.zeros(pairs, np.float32)
    inv_freq[:turning] = np.float32(1) / _powers(parameters.theta, turning, parameters.rotary_dim)
    return inv_freq / np.float32(scaling.factor)


def _longrope(parameters: RopeParameters, factors: tuple[float, ...]) -> NDArray[np.float32]:
    powers = _powers(parameters.theta, parameters.rotary_dim // 2, parameters.rotary_dim)
    return np.float32(1) / (np.array(factors, np.float32) * powers)


def _yarn(parameters: RopeParameters, scaling: YarnScaling) -> NDArray[np.float32]:
    one = np.float32(1)
    powers = _powers(parameters.theta, parameters.rotary_dim // 2, parameters.rotary_dim)
    kept, stretched = one / powers, one / (np.float32(scaling.factor) * powers)
    low, high = yarn_ramp(scaling, theta=parameters.theta, rotary_dim=parameters.rotary_dim)
    steps = np.arange(parameters.rotary_dim // 2, dtype=np.float32) - np.float32(low)
    keep = one - np.clip(steps / np.float32(high - low), np.float32(0), one)
    return np.asarray(stretched * (one - keep) + kept * keep, np.float32)


def _llama3(inv_freq: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
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
