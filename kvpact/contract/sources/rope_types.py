"""Scaling of a rotary table, read from settings under canonical keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvpact.contract.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
    longrope_amplitude,
    yarn_amplitude,
)
from kvpact.contract.sources.numbers import flag, positive_int, positive_number, wrong_value

log = logging.getLogger(__name__)
ORIGINAL = "original_max_position_embeddings"


def scaling_of(settings: Mapping[str, Any], *, rotary_dim: int, context_tokens: int) -> Scaling | None:
    """Scaling of the settings' rope_type, None for the default type. Raises UnreadableSource by key."""
    match settings["rope_type"]:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=_factor(settings))
        case "dynamic":
            if rotary_dim < 4:
                raise wrong_value("rope_type", "dynamic", f"another, since only {rotary_dim} lanes turn")
            return DynamicScaling(factor=_factor(settings), context_tokens=context_tokens)
        case "llama3":
            return _llama3(settings, context_tokens)
        case "yarn":
            return _yarn(settings, context_tokens)
        case "longrope":
            return _longrope(settings, rotary_dim, context_tokens)
        case "proportional":
            return _proportional(settings)
        case other:
            raise wrong_value("rope_type", other, "a known type")


def original_context(settings: Mapping[str, Any], context_tokens: int) -> int:
    """Tokens that the model was first trained with; absent: as many as it has now."""
    return positive_int(ORIGINAL, settings.get(ORIGINAL, context_tokens))


def stretch(settings: Mapping[str, Any], context_tokens: int) -> float:
    """How many times max_position_embeddings a model may be asked to serve.

    More than once where scaling reaches beyond that number: dynamic scaling, and yarn where the number is
    still the original one.
    """
    if settings["rope_type"] == "dynamic":
        return _factor(settings)
    if settings["rope_type"] == "yarn" and settings.get("factor") is not None:
        return max(1.0, _factor(settings) * original_context(settings, context_tokens) / context_tokens)
    return 1.0


def _factor(settings: Mapping[str, Any]) -> float:
    factor = positive_number("factor", settings.get("factor"))
    if factor < 1:
        raise wrong_value("factor", factor, "a number of at least 1")
    return factor


def _llama3(settings: Mapping[str, Any], context_tokens: int) -> Llama3Scaling:
    low = positive_number("low_freq_factor", settings.get("low_freq_factor"))
    high = positive_number("high_freq_factor", settings.get("high_freq_factor"))
    if high <= low:
        raise wrong_value("high_freq_factor", high, f"more than low_freq_factor, which is {low!r}")
    return Llama3Scaling(
        factor=_factor(settings),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=original_context(settings, context_tokens),
    )


def _yarn(settings: Mapping[str, Any], context_tokens: int) -> YarnScaling:
    original = original_context(settings, context_tokens)
    ratio = context_tokens / original
    factor = ratio if _is_null(settings, "factor") else _factor(settings)
    if ratio not in (1.0, factor):
        log.warning(
            "yarn factor %r holds, although max_position_embeddings / %s is %r", factor, ORIGINAL, ratio
        )
    if settings["rope_theta"] <= 1:
        raise wrong_value("rope_theta", settings["rope_theta"], "more than 1 for rope_type yarn")
    fast, slow = _or_default(settings, "beta_fast", 32.0), _or_default(settings, "beta_slow", 1.0)
    if fast < slow:
        raise wrong_value("beta_fast", fast, f"at least beta_slow, which is {slow!r}")
    weights = _weight(settings, "mscale"), _weight(settings, "mscale_all_dim")
    amplitude = _amplitude(settings)
    return YarnScaling(
        factor=factor,
        original_context_tokens=original,
        amplitude=yarn_amplitude(factor, *weights) if amplitude is None else amplitude,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag("truncate", settings.get("truncate", True)),
    )


def _longrope(settings: Mapping[str, Any], rotary_dim: int, context_tokens: int) -> LongropeScaling:
    original = original_context(settings, context_tokens)
    given = settings.get("factor")
    factor = context_tokens / original if given is None else _factor(settings)
    amplitude = _amplitude(settings)
    return LongropeScaling(
        short_factors=_factors(settings, "short_factor", rotary_dim // 2),
        long_factors=_factors(settings, "long_factor", rotary_dim // 2),
        original_context_tokens=original,
        amplitude=longrope_amplitude(factor, original) if amplitude is None else amplitude,
    )


def _factors(settings: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    given = settings.get(key)
    if not isinstance(given, list):
        raise wrong_value(key, given, f"a list of {count} numbers")
    if len(given) != count:
        raise wrong_value(key, f"{len(given)} numbers", f"{count} numbers, half of the lanes that turn")
    return tuple(positive_number(f"{key}[{index}]", value) for index, value in enumerate(given))


def _proportional(settings: Mapping[str, Any]) -> ProportionalScaling:
    share = settings.get("partial_rotary_factor", 1.0)
    factor = 1.0 if settings.get("factor") is None else _factor(settings)
    proportion = positive_number("partial_rotary_factor", share)
    if proportion > 1:
        raise wrong_value("partial_rotary_factor", share, "at most 1")
    return ProportionalScaling(proportion=proportion, factor=factor)


def _amplitude(settings: Mapping[str, Any]) -> float | None:
    given = settings.get("attention_factor")
    return None if given is None else positive_number("attention_factor", given)


def _weight(settings: Mapping[str, Any], key: str) -> float | None:
    """A weight of yarn's amplitude; 0 counts as absent."""
    given = settings.get(key)
    if given is None or (given == 0 and not isinstance(given, bool)):
        return None
    return positive_number(key, given)


def _or_default(settings: Mapping[str, Any], key: str, default: float) -> float:
    return positive_number(key, settings.get(key) or default)


def _is_null(settings: Mapping[str, Any], key: str) -> bool:
    """Given as null, which is more than being absent."""
    return key in settings and settings[key] is None
