"""Powers in float32, bit for bit as torch computes them, without torch.

torch raises a base to a vector of exponents in blocks of 32 with SLEEF's `powf` (within 1 ulp, double-float
arithmetic with fused multiply-add) and does the rest with the C library. The last bit of a rotary table
depends on it, so the same arithmetic is written out here, and the rest is rounded from float64. With vectors
shorter than 512 bits torch takes smaller blocks, and a few values of the rest differ in the last bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
Pair = tuple[F32, F32]
"""Unevaluated sum of a float32 and its float32 remainder."""

VECTOR_BLOCK = 32
_LN2 = (0.69314718246459960938, -1.904654323148236017e-09)
_LN2_UPPER, _LN2_LOWER = 0.693145751953125, 1.428606765330187045e-06
_LOG2_E = 1.4426950408889634
_LOG_TERMS = (0.240320354700088500976562, 0.285112679004669189453125, 0.400007992982864379882812)
_LOG_LEAD = (0.66666662693023681640625, 3.69183861259614332084311e-09)
_EXP_TERMS = (
    0.00136324646882712841033936,
    0.00836596917361021041870117,
    0.0416710823774337768554688,
    0.166665524244308471679688,
    0.499999850988388061523438,
)


def power32(base: float, exponents: F32) -> F32:
    """base ** exponents in float32 for a base above 0 and exponents in [0, 1)."""
    powers: F32 = np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)
    block_end = exponents.size // VECTOR_BLOCK * VECTOR_BLOCK
    if block_end:
        powers[:block_end] = _exp(_times(_log(_f32(base)), exponents[:block_end]))
    return powers


def _log(x: F32) -> Pair:
    shifted = _f32(x * np.float32(1 / np.float32(0.75)))
    exponent = np.frexp(shifted)[1] - 1
    mantissa = _f32(np.ldexp(x, -exponent))
    z = _divide(_sum(_f32(-1), mantissa), _sum(_f32(1), mantissa))
    z2 = _square(z)
    tail = _polynomial(_LOG_TERMS, z2[0])
    total = _times((_f32(_LN2[0]), _f32(_LN2[1])), _f32(exponent))
    total = _add(total, (z[0] * np.float32(2), z[1] * np.float32(2)))
    lead = _add_any(_times(z2, tail), (_f32(_LOG_LEAD[0]), _f32(_LOG_LEAD[1])))
    return _add(total, _multiply(_multiply(z2, z), lead))


def _exp(x: Pair) -> F32:
    halvings = _f32(np.rint((x[0] + x[1]) * np.float32(_LOG2_E)))
    rest = _add_one(x, halvings * np.float32(-_LN2_UPPER))
    rest = _add_one(rest, halvings * np.float32(-_LN2_LOWER))
    head = rest[0] + rest[1]
    rest = (head, (rest[0] - head) + rest[1])
    series = _add(rest, _times(_square(rest), _polynomial(_EXP_TERMS, rest[0])))
    one = _f32(1)
    head = one + series[0]
    low = ((one - head) + series[0]) + series[1]
    return _f32(np.ldexp(head + low, halvings.astype(np.int32)))


def _f32(value: ArrayLike) -> F32:
    return np.asarray(value, np.float32)


def _fused(a: F32, b: F32, c: F32) -> F32:
    return _f32((a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32))


def _polynomial(terms: tuple[float, ...], x: F32) -> F32:
    value = _f32(terms[0])
    for term in terms[1:]:
        value = _fused(value, x, _f32(term))
    return value


def _sum(x: F32, y: F32) -> Pair:
    head = _f32(x + y)
    back = _f32(head - x)
    return head, _f32((x - (head - back)) + (y - back))


def _add(x: Pair, y: Pair) -> Pair:
    head = _f32(x[0] + y[0])
    return head, _f32((((x[0] - head) + y[0]) + x[1]) + y[1])


def _add_any(x: Pair, y: Pair) -> Pair:
    head, low = _sum(x[0], y[0])
    return head, _f32(low + (x[1] + y[1]))


def _add_one(x: Pair, y: F32) -> Pair:
    head, low = _sum(x[0], y)
    return head, _f32(low + x[1])


def _times(x: Pair, y: F32) -> Pair:
    head = _f32(x[0] * y)
    return head, _fused(x[1], y, _fused(x[0], y, -head))


def _multiply(x: Pair, y: Pair) -> Pair:
    head = _f32(x[0] * y[0])
    return head, _fused(x[0], y[1], _fused(x[1], y[0], _fused(x[0], y[0], -head)))


def _square(x: Pair) -> Pair:
    head = _f32(x[0] * x[0])
    return head, _fused(_f32(x[0] + x[0]), x[1], _fused(x[0], x[0], -head))


def _divide(x: Pair, y: Pair) -> Pair:
    inverse = _f32(np.float32(1) / y[0])
    head = _f32(x[0] * inverse)
    error = _fused(-y[1], inverse, _fused(-y[0], inverse, _f32(1)))
    return head, _fused(head, error, _fused(x[1], inverse, _fused(inverse, x[0], -head)))
