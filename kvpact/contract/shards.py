"""Which KV heads and layers a shard holds, and which writer's shard gives each head to a reader.

Rank r of a split of H heads in n holds H / n heads from r * H / n on where n divides H, and the one head
r * H // n where H divides n; no other split is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpact.contract.contract import Contract, LayerGroup, Shard
from kvpact.contract.describe import describe_layers
from kvpact.types import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """Where one of the reader's heads lies."""

    writer: int
    """Index of the writer."""
    head: int
    """Head among those that this writer stores."""


def widest_heads(contract: Contract) -> int:
    """KV heads of the group with most of them; the heads that a shard's range counts."""
    return max((group.kv_heads for group in contract.layer_groups), default=0)


def split_heads(heads: int, rank: int, size: int) -> range | None:
    """Heads that rank `rank` of `size` holds of `heads`; None where they can't be split so."""
    if heads < 1 or size < 1 or (heads % size and size % heads):
        return None
    start = rank * heads // size
    return range(start, start + max(1, heads // size))


def held_heads(group: LayerGroup, contract: Contract) -> range:
    """Heads of the whole model that `contract`'s shard stores of `group`. A latent row counts as one head."""
    if group.kind is LayerKind.MLA_LATENT:
        return range(1)
    shard, widest = contract.layout.shard, widest_heads(contract)
    start = shard.head_start * group.kv_heads // widest
    return range(start, -(-shard.head_end * group.kv_heads // widest))


def holds_layer(shard: Shard, layer: int) -> bool:
    """Whether the shard stores `layer`."""
    return shard.layer_start <= layer < shard.layer_end


def head_sources(writers: Sequence[Contract], reader: Contract, layer: int) -> tuple[HeadSource | None, ...]:
    """For each head that the reader stores of `layer`, the writer of lowest rank that has it, or None."""
    order = sorted(range(len(writers)), key=lambda i: writers[i].layout.shard.tensor_parallel_rank)
    held = [(i, _heads_of(writers[i], layer)) for i in order]
    return tuple(
        next((HeadSource(writer=i, head=heads.index(head)) for i, heads in held if head in heads), None)
        for head in held_heads(reader.group_of(layer), reader)
    )


def obstacle_to_splits(contracts: Iterable[Contract]) -> str:
    """Why a side's heads can't be split as it says; empty where all can."""
    for contract in contracts:
        size = contract.layout.shard.tensor_parallel_size
        for group in contract.layer_groups if size != 1 else ():
            if group.kind is not LayerKind.MLA_LATENT and split_heads(group.kv_heads, 0, size) is None:
                return f"{group.kv_heads} KV heads can't be split over {size} ranks"
    return ""


def uncovered(writers: Sequence[Contract], reader: Contract) -> str:
    """What the reader's shard needs and no writer holds; empty if they cover it. Other layers don't count."""
    shard, common = reader.layout.shard, _layers(reader).intersection(*map(_layers, writers))
    needed = [layer for layer in range(shard.layer_start, shard.layer_end) if layer in common]
    lacking: dict[tuple[int, ...], list[int]] = {}
    for layer in needed:
        heads = held_heads(reader.group_of(layer), reader)
        sources = head_sources(writers, reader, layer)
        missing = tuple(head for head, source in zip(heads, sources, strict=True) if source is None)
        if missing:
            lacking.setdefault(missing, []).append(layer)
    parts = (
        f"no writer holds head {', '.join(map(str, heads))} of {describe_layers(layers)}"
        for heads, layers in lacking.items()
    )
    return "; ".join(parts)


def _heads_of(contract: Contract, layer: int) -> range:
    if not holds_layer(contract.layout.shard, layer) or layer not in _layers(contract):
        return range(0)
    return held_heads(contract.group_of(layer), contract)


def _layers(contract: Contract) -> frozenset[int]:
    return frozenset(layer for group in contract.layer_groups for layer in group.layers)
