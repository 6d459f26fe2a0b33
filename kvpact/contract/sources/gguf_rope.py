"""Rotary settings out of GGUF metadata, in the words of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.sources.gguf_file import GgufFile

FREQUENCY_FACTORS = "rope_freqs.weight"
"""Divisors of the inverse frequencies, one a lane pair."""
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
DEFAULT_THETA = 10_000.0
"""What the format says for a file without rope.freq_base."""
PUBLISHED_HIGH, PUBLISHED_CONTEXT = 4.0, 8192
"""high_freq_factor over low_freq_factor, and the context, of the models that the scheme was made for."""
SAME = 1e-5
"""Relative difference at which factors count as made by a formula."""
UNSERVED = ("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "rope.dimension_sections")


def rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Theta, type and numbers of the type, and the share of lanes that turn where it isn't the whole head.

    Raises:
        UnreadableSource: an unknown type, a number that is missing, or settings that contradict each other.
    """
    for key in UNSERVED:
        if file.of_architecture(key) is not None:
            raise file.broken(f"{file.architecture}.{key} isn't served", key)
    theta = file.positive(file.own("rope.freq_base"), DEFAULT_THETA)
    rotary_dim = file.whole(file.own("rope.dimension_count"), head_dim)
    if not 0 < rotary_dim <= head_dim:
        raise file.broken(
            f"rope.dimension_count is {rotary_dim}, expected 1 to {head_dim}", "rope.dimension_count"
        )
    found = {"rope_theta": theta} | _scaling(file, theta, rotary_dim)
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = _share(rotary_dim, head_dim)
    return found


def _scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    kind = file.text(file.own("rope.scaling.type"), "none")
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return _by_length(file)
    if FREQUENCY_FACTORS in file.tensors:
        if kind != "none":
            raise file.broken(
                f"both {FREQUENCY_FACTORS} and rope.scaling.type {kind}; keep one", "rope.scaling.type"
            )
        return _by_lane(file, theta, rotary_dim)
    legacy = file.positive(file.own("rope.scale_linear"), None)
    match kind:
        case "none":
            return {"rope_type": "default"} if legacy is None else _linear(legacy)
        case "linear":
            return _linear(_factor(file))
        case "yarn":
            return _yarn(file)
        case _:
            raise file.broken(
                f"rope.scaling.type is {kind!r}, expected none, linear or yarn", "rope.scaling.type"
            )


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile) -> dict[str, Any]:
    factor = _factor(file)
    weight = file.positive(file.own("rope.scaling.attn_factor"), 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _context(file, "rope.scaling.original_context_length"),
        "beta_fast": file.positive(file.own("rope.scaling.yarn_beta_fast"), 32.0),
        "beta_slow": file.positive(file.own("rope.scaling.yarn_beta_slow"), 1.0),
        "attention_factor": weight * (0.1 * math.log(factor) + 1.0) if factor > 1 else weight,
    }


def _by_length(file: GgufFile) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": _numbers(file.tensor(SHORT_FACTORS)),
        "long_factor": _numbers(file.tensor(LONG_FACTORS)),
        "original_max_position_embeddings": _context(file, "rope.scaling.original_context_length"),
        "attention_factor": file.positive(file.own("rope.scaling.attn_factor"), 1.0),
    }


def _by_lane(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    factors = file.tensor(FREQUENCY_FACTORS)
    if factors.shape != (rotary_dim // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        raise file.broken(
            f"{FREQUENCY_FACTORS} of shape {list(factors.shape)}, expected {rotary_dim // 2} numbers above 0",
            FREQUENCY_FACTORS,
        )
    if np.all(factors == 1):
        return {"rope_type": "default"}
    formula = llama3_formula(factors.astype(np.float64), theta)
    if formula is not None:
        return formula
    listed = _numbers(factors)
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": _context(file, "context_length"),
    }


def llama3_formula(factors: NDArray[np.float64], theta: float) -> dict[str, Any] | None:
    """The numbers of llama3 scaling that make these factors, low_freq_factor taken as 1; None: none do."""
    pairs = len(factors)
    turns = theta ** (-np.arange(pairs) / pairs) / (2 * math.pi)
    largest = float(factors.max())
    candidates = [(PUBLISHED_HIGH, PUBLISHED_CONTEXT)]
    blended = (factors > 1) & (factors < largest)
    share = (1 / factors[blended] - 1 / largest) / (1 - 1 / largest) if largest > 1 else np.zeros(0)
    if len(share) == 1:
        context = (1 + share * (PUBLISHED_HIGH - 1)) / turns[blended]
        candidates.append((PUBLISHED_HIGH, round(float(context[0]))))
    if len(share) > 1:
        columns = np.stack([turns[blended], -share], axis=1)
        (context, span), *_ = np.linalg.lstsq(columns, np.ones(len(share)), rcond=None)
        candidates.append((round(1 + float(span), 3), round(float(context))))
    for high, context_tokens in candidates:
        if high <= 1 or context_tokens < 1:
            continue
        share = np.clip((context_tokens * turns - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - share) / largest + share), factors, rtol=SAME, atol=0):
            return {
                "rope_type": "llama3",
                "factor": float(str(np.float32(largest))),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": context_tokens,
            }
    return None


def _factor(file: GgufFile) -> float:
    key = "rope.scaling.factor"
    value = file.positive(file.own(key), None)
    if value is None:
        raise file.broken(f"{file.architecture}.{key} is missing", key)
    return value


def _context(file: GgufFile, key: str) -> int:
    value = file.whole(file.own(key), None)
    if value is None:
        raise file.broken(f"{file.architecture}.{key} is missing", key)
    return value


def _numbers(values: NDArray[np.float32]) -> list[float]:
    return [float(value) for value in values]


def _share(part: int, whole: int) -> float:
    """A fraction f with int(whole * f) == part."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2)
