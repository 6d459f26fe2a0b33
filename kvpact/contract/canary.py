"""The probe of a new pair: where its tokens stand, and for which lengths it runs.

A short contiguous probe is blind to scaled frequencies and to windows, since both act far from position 0.
"""

from __future__ import annotations

from kvpact.contract.compare import pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.reach import first_reachable
from kvpact.types import FrequencyPolicy

PROBE_TOKENS = 17
NEAR_ZERO = 9
"""Positions {0..8} are always in."""


def probe_lengths(writer: Contract, reader: Contract) -> tuple[int, ...]:
    """Request lengths to probe, ascending: one for each table that a request can get. Empty: none fits.

    The context that both serve; where tables go by request length also the largest length of each table and
    one above it.
    """
    reach = pairing_reach(writer, reader)
    lengths = {reach}
    for group in writer.layer_groups + reader.layer_groups:
        if group.rotary.frequency_policy is FrequencyPolicy.FROZEN:
            continue
        for table in group.rotary.tables:
            if table.upper_length is not None and table.upper_length < reach:
                lengths |= {table.upper_length, table.upper_length + 1}
    return tuple(sorted(length for length in lengths if length >= 3))


def probe_positions(writer: Contract, reader: Contract, length: int) -> tuple[int, ...]:
    """Positions of the probe's tokens, ascending, for requests of `length` >= 3 tokens; at most 17.

    The token that is decoded behind it stands at `length` - 2, the largest position that a request feeds.
    Chosen are {0..8}, the position before it, both sides of each window's edge as that token sees it and of
    each switch between tables, and then the largest positions that are left.
    """
    decoded = length - 2
    wanted = [decoded - 1]
    for group in writer.layer_groups + reader.layer_groups:
        if group.window is not None:
            first = first_reachable(group, decoded)
            wanted += [first, first - 1]
        for table in group.rotary.tables:
            if table.upper_length is not None:
                wanted += [table.upper_length, table.upper_length - 1]
    wanted += range(decoded - 1, -1, -1)
    chosen = {position for position in range(NEAR_ZERO) if position < decoded}
    for position in wanted:
        if len(chosen) == PROBE_TOKENS:
            break
        if 0 <= position < decoded:
            chosen.add(position)
    return tuple(sorted(chosen))


def probe_tokens(count: int, vocab_size: int) -> tuple[int, ...]:
    """Fixed token ids, all different while the vocabulary allows."""
    return tuple((7919 * index + 13) % vocab_size for index in range(count))
