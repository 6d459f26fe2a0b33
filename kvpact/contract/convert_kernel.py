"""One pass over memory from a writer's blocks into a reader's, compiled by numba.

Turns lanes, reorders them, casts and places rows, token by token, by the reference's float32 operations in
its order, so the bits are the same, except those that tell one NaN from another. bfloat16 numbers are their
bits, uint16, rounded to nearest, ties even; finite ones that are too large become the largest.
Every index is unsigned: numba checks signed ones for wrapping around, and such loops aren't vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

RUN = 32
"""Most tokens of one head before the next head's turn, so that a run stays in the nearest cache."""
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}


def _type_float_of(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


def _type_bits_of(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


_float_of: Any = intrinsic(_type_float_of)
"""The float32 of 32 bits."""
_bits_of: Any = intrinsic(_type_bits_of)
"""The 32 bits of a float32."""


def _wide(number: Any) -> Any:
    """A stored number as float32."""
    raise NotImplementedError


def _narrow(number: Any, like: Any) -> Any:
    """A float32 as numbers like `like` are stored."""
    raise NotImplementedError


def _carry(number: Any, like: Any) -> Any:
    """A number that isn't turned: its bits where both sides store alike."""
    raise NotImplementedError


# numba wants an implementation with exactly the arguments, annotations included, of what picks it by types.


@overload(_wide)
def _compile_wide(number: Any) -> Any:
    def same(number: Any) -> Any:
        return number

    def shifted(number: Any) -> Any:
        return _float_of(np.uint32(np.uint32(number) << np.uint32(16)))

    return shifted if number == types.uint16 else same


@overload(_narrow)
def _compile_narrow(number: Any, like: Any) -> Any:
    def same(number: Any, like: Any) -> Any:
        return number

    def rounded(number: Any, like: Any) -> Any:
        bits = _bits_of(number)
        sum_of = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        beyond = np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(0x7F7F8000)) < np.uint32(0x8000)
        short = np.uint32((sum_of >> np.uint32(16)) - (np.uint32(1) if beyond else np.uint32(0)))
        return np.uint16(short if number == number else np.uint32(0x7FC0))

    return rounded if like == types.uint16 else same


@overload(_carry)
def _compile_carry(number: Any, like: Any) -> Any:
    def same(number: Any, like: Any) -> Any:
        return number

    def recast(number: Any, like: Any) -> Any:
        return _narrow(_wide(number), like)

    return same if number == like else recast


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _copy_run(
    source: Any, s: Any, slot: Any, target: Any, d: Any, to_slot: Any, run: Any, first: Any, end: Any
) -> None:
    like = target[0]
    for r in range(run):
        for i in range(first, end):
            target[d + r * to_slot + i] = _carry(source[s + r * slot + i], like)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _turn_run(
    source: Any, s: Any, slot: Any, target: Any, d: Any, to_slot: Any, run: Any, cos: Any, sin: Any, c: Any,
    half: Any, source_step: Any, source_gap: Any, step: Any, gap: Any,
) -> None:  # fmt: skip
    """Pairs of lanes by the angles from c on; a pair's lanes lie `gap` apart, the next pair `step` on.

    Two loops with one place to write to each: a loop with two needs more checks for overlap than the
    compiler is ready to make, and isn't vectorised.
    """
    like = target[0]
    for r in range(run):
        from_row, to_row, angles = s + r * slot, d + r * to_slot, c + r * half
        for i in range(half):
            first = _wide(source[from_row + i * source_step])
            second = _wide(source[from_row + source_gap + i * source_step])
            turned = first * cos[angles + i] - second * sin[angles + i]
            target[to_row + i * step] = _narrow(turned, like)
        for i in range(half):
            first = _wide(source[from_row + i * source_step])
            second = _wide(source[from_row + source_gap + i * source_step])
            turned = second * cos[angles + i] + first * sin[angles + i]
            target[to_row + gap + i * step] = _narrow(turned, like)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _move_run(
    source: Any, s: Any, slot: Any, target: Any, d: Any, to_slot: Any, run: Any, half: Any,
    source_step: Any, source_gap: Any, step: Any, gap: Any,
) -> None:  # fmt: skip
    """Pairs of lanes to another order, not turned."""
    like = target[0]
    for r in range(run):
        from_row, to_row = s + r * slot, d + r * to_slot
        for i in range(half):
            target[to_row + i * step] = _carry(source[from_row + i * source_step], like)
        for i in range(half):
            target[to_row + gap + i * step] = _carry(source[from_row + source_gap + i * source_step], like)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _land_run(
    source: Any, s: Any, slot: Any, target: Any, d: Any, to_slot: Any, run: Any, lanes: Any, cos: Any,
    sin: Any, c: Any, orders: Any,
) -> None:  # fmt: skip
    """A run of rows; steps are literals, so that each pair of lane orders is compiled for itself."""
    one, two, half = np.uint64(1), np.uint64(2), lanes[1]
    s, d = s + lanes[0], d + lanes[0]
    turn, from_adjacent, to_adjacent = orders
    if not turn and from_adjacent:
        _move_run(source, s, slot, target, d, to_slot, run, half, two, one, one, half)
    elif not turn:
        _move_run(source, s, slot, target, d, to_slot, run, half, one, half, two, one)
    elif not from_adjacent and not to_adjacent:
        _turn_run(source, s, slot, target, d, to_slot, run, cos, sin, c, half, one, half, one, half)
    elif from_adjacent and to_adjacent:
        _turn_run(source, s, slot, target, d, to_slot, run, cos, sin, c, half, two, one, two, one)
    elif from_adjacent:
        _turn_run(source, s, slot, target, d, to_slot, run, cos, sin, c, half, two, one, one, half)
    else:
        _turn_run(source, s, slot, target, d, to_slot, run, cos, sin, c, half, one, half, two, one)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def land_rows(
    source: Any, source_strides: Any, target: Any, target_strides: Any, blocks: Any, first_token: Any,
    tokens: Any, heads: Any, lanes: Any, cos: Any, sin: Any, orders: Any,
) -> None:  # fmt: skip
    """Rows of `tokens` tokens from `source` into slots [first_token, first_token + tokens) of `blocks`.

    Numbers are flat arrays. Strides: start, block, slot, head, tokens in a block; all uint64, in numbers.
    `lanes`: first rotary lane, pairs, width of a row. `orders`: whether to turn, and whether either side
    keeps pairs adjacent. Turning takes cos and sin, float32 [tokens * pairs]. Without turning and with
    equal orders whole rows are copied. Goes by runs of tokens that lie in one block on both sides.
    """
    start, block, slot, head, size = source_strides
    _, to_block, to_slot, to_head, to_size = target_strides
    zero, offset, end, width = np.uint64(0), lanes[0], lanes[0] + lanes[1] + lanes[1], lanes[2]
    plain = not orders[0] and orders[1] == orders[2]
    t = zero
    while t < tokens:
        g = first_token + t
        used, to_used = t % size, g % to_size
        run = min(min(size - used, to_size - to_used), min(tokens - t, np.uint64(RUN)))
        for h in range(heads):
            s = start + (t // size) * block + used * slot + h * head
            d = blocks[g // to_size] * to_block + to_used * to_slot + h * to_head
            if plain:
                _copy_run(source, s, slot, target, d, to_slot, run, zero, width)
                continue
            _copy_run(source, s, slot, target, d, to_slot, run, zero, offset)
            _land_run(source, s, slot, target, d, to_slot, run, lanes, cos, sin, t * lanes[1], orders)
            _copy_run(source, s, slot, target, d, to_slot, run, end, width)
        t += run
