"""Which rows of a prompt's cache a writer has to show: picked by the reader's nonce, alike on both sides.

A row is float32 and costs 4 * H * (2 * Dk + Dv) bytes. Rows are dealt out so that all of them together take
at most 1 % of the payload of a handoff of 512 tokens: 3 rows a layer for a float32 cache, 1 or 2 for a 16-bit
one. Where the cache is narrower still, or windows let most of those 512 tokens stay behind, that is less than
a row a layer: then the nonce picks the layers too, but each layer group shows one row whatever it costs.

Each group shows the prompt's last token, so that a last block that was never filled falls in every handoff,
and from its second row on a row of the lower half, so that a stale prefix seldom stays unseen.

What so few rows can't see is damage to a part of one request. One stale block of 16 tokens escapes, where
prompts have 512 and 4096 tokens: in all layers in 2 % and 51 % of handoffs with 80 layers, 13 % and 70 %
with 30, 81 % and 98 % with two; in one layer alone in nine of ten. The writer knows the places before it
sends. So witnesses catch a writer that is faulty, which does the same wrong thing everywhere, and not a
malicious one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.ledger import ledger
from kvpact.contract.shards import held_heads, holds_layer

REFERENCE_TOKENS = 512
SHARE = 0.01
FRAMING_BYTES = 24
"""Room for tags, lengths, layer and position of one row on the wire."""
MOST_BYTES = 2 << 20
"""Rows travel in one message, which gRPC limits to 4 MiB."""
MOST_ROWS = 4
"""Rows of one layer, however cheap they are."""
_KINDS = ("last", "lower", "any", "any")
"""Where rows of a group lie, dealt over its layers in the nonce's order: at the prompt's last token, in its
lower half, anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """One row to show: token `token`, counted from 0 in the prompt, of one layer."""

    layer: int
    token: int


def row_bytes(contract: Contract, group: LayerGroup) -> int:
    """Bytes of one row on the wire: raw key, key as attended and value in float32, and their framing."""
    heads = len(held_heads(group, contract))
    return 4 * heads * (2 * group.key_dim + group.value_dim) + FRAMING_BYTES


def budget_bytes(contract: Contract) -> int:
    """1 % of what a handoff of 512 tokens carries, unreachable blocks left out; never more than a message."""
    return min(int(ledger(contract, REFERENCE_TOKENS).handoff_bytes * SHARE), MOST_BYTES)


def witness_places(
    contract: Contract, nonce: bytes, *, prompt_tokens: int, first_tokens: Mapping[int, int]
) -> tuple[Place, ...]:
    """The rows that a writer of `contract` has to show, ascending; never none.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        first_tokens: layer -> the first token that the writer computes and sends of it; absent means 0.
    """
    draw = draws(b"kvpact witness", nonce, prompt_tokens)
    rows = _rows_by_layer(contract, draw)
    places: list[Place] = []
    for group in contract.layer_groups:
        kinds = itertools.cycle(_KINDS)
        for layer in shuffled([layer for layer in group.layers if layer in rows], draw):
            first = min(first_tokens.get(layer, 0), prompt_tokens - 1)
            chosen = list(itertools.islice(kinds, rows[layer]))
            places += [
                Place(layer=layer, token=token) for token in _tokens(draw, first, prompt_tokens, chosen)
            ]
    return tuple(sorted(places))


def _rows_by_layer(contract: Contract, draw: Iterator[int]) -> dict[int, int]:
    """Deals rows out over the layers that the shard holds, round after round, while the budget lasts."""
    left = budget_bytes(contract)
    held = {
        layer: row_bytes(contract, group)
        for group in contract.layer_groups
        for layer in group.layers
        if holds_layer(contract.layout.shard, layer)
    }
    dealt: dict[int, int] = {}
    for group in contract.layer_groups:
        layers = [layer for layer in group.layers if layer in held]
        if layers:
            layer = layers[next(draw) % len(layers)]
            dealt[layer] = 1
            left -= held[layer]
    for count in range(1, MOST_ROWS + 1):
        for layer in shuffled(sorted(held), draw):
            if dealt.get(layer, 0) < count and held[layer] <= left:
                dealt[layer] = count
                left -= held[layer]
    return dealt


def _tokens(draw: Iterator[int], first: int, end: int, kinds: Sequence[str]) -> set[int]:
    """Distinct tokens of [first, end), one of each kind; token 0 isn't alone unless it is the prompt."""
    lowest, middle = max(first, 1) if len(kinds) == 1 else first, (first + end) // 2
    chosen: set[int] = set()
    for kind in kinds:
        if kind == "lower" and lowest < middle:
            chosen.add(lowest + next(draw) % (middle - lowest))
        elif kind == "any" and lowest < end:
            chosen.add(lowest + next(draw) % (end - lowest))
        else:
            chosen.add(end - 1)
    while len(chosen) < min(len(kinds), end - first):
        chosen.add(first + next(draw) % (end - first))
    return chosen


def shuffled(numbers: Sequence[int], draw: Iterator[int]) -> list[int]:
    """Distinct numbers in the draw's order."""
    keys = [(next(draw), number) for number in numbers]
    return [number for _, number in sorted(keys)]


def draws(purpose: bytes, nonce: bytes, prompt_tokens: int) -> Iterator[int]:
    """64-bit numbers, without end, that nobody can tell who doesn't know the nonce."""
    counter = 0
    while True:
        text = purpose + prompt_tokens.to_bytes(8, "little") + counter.to_bytes(8, "little")
        block = hashlib.blake2b(text, key=nonce, digest_size=64).digest()
        yield from (int.from_bytes(block[at : at + 8], "little") for at in range(0, 64, 8))
        counter += 1
