"""What a cache of N tokens costs: bytes to keep and to hand over, work to turn its keys and to prefill it.

Everything counts what one worker's shard holds. Cheap rephasing proves nothing about a cache's meaning, and
costly prefill excuses nothing: these are numbers for routing and for people, never a reason to accept.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.contract.contract import Contract, LayerGroup, Layout
from kvpact.contract.numbers import DTYPE_BYTES
from kvpact.contract.reach import attended_pairs, first_reachable
from kvpact.contract.shards import held_heads, holds_layer
from kvpact.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Costs of one sequence, summed over the layers and heads that the shard holds."""

    tokens: int
    key_bytes: int
    """Keys of exactly `tokens` tokens, in the contract's own dtype; quantization scales are not counted."""
    value_bytes: int
    cache_bytes: int
    """Keys and values: sum over layers of H (d_k s_k + d_v s_v) N, which is 2 L H d N s for one dtype."""
    block_count: int
    """Blocks of one layer that the sequence takes."""
    allocated_bytes: int
    """Keys and values of whole blocks: what the sequence takes of a pool."""
    handoff_bytes: int
    """Payload of a handoff: whole blocks, less those that the next token can't reach."""
    rephase_lanes: int
    """Lanes of keys to turn to bring them to another table or state: sum over layers of H r N."""
    attention_pairs: int
    """Pairs of query and visible key in a full prefill: sum over layers of H N (N + 1) / 2, less what windows
    hide. Counted once for each KV head; g query heads per KV head do g times as many."""
    attention_multiplies: int
    """Multiplications of these pairs: d_k for the logit and d_v for the output each."""


def ledger(contract: Contract, tokens: int) -> Ledger:
    """Costs of `tokens` tokens from position 0 under `contract`.

    Raises:
        BadRequest: `tokens` is less than 1.
    """
    if tokens < 1:
        raise BadRequest(f"tokens is {tokens}; expected at least 1", param="tokens")
    layout = contract.layout
    blocks = -(-tokens // layout.block_size)
    key_bytes = value_bytes = allocated = handoff = lanes = pairs = multiplies = 0
    for group in contract.layer_groups:
        layers = sum(holds_layer(layout.shard, layer) for layer in group.layers)
        heads = layers * len(held_heads(group, contract))
        key_row, value_row = _row_bytes(group, layout)
        key_bytes += heads * key_row * tokens
        value_bytes += heads * value_row * tokens
        block_bytes = heads * (key_row + value_row) * layout.block_size
        allocated += block_bytes * blocks
        handoff += block_bytes * (blocks - first_reachable(group, tokens) // layout.block_size)
        lanes += heads * group.rotary.rotary_dim * tokens
        seen = heads * attended_pairs(group, tokens)
        pairs += seen
        multiplies += seen * (group.key_dim + group.value_dim)
    return Ledger(
        tokens=tokens,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
        cache_bytes=key_bytes + value_bytes,
        block_count=blocks,
        allocated_bytes=allocated,
        handoff_bytes=handoff,
        rephase_lanes=lanes,
        attention_pairs=pairs,
        attention_multiplies=multiplies,
    )


def _row_bytes(group: LayerGroup, layout: Layout) -> tuple[int, int]:
    """Key and value of one token and head, as stored."""
    return group.key_dim * DTYPE_BYTES[layout.key_dtype], group.value_dim * DTYPE_BYTES[layout.value_dtype]
