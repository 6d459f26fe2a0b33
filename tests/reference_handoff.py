"""A tiny model's cache put into bytes and landed at a reader: one handoff without any transport.

Shapes: T tokens, H KV heads, D lanes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvpact.contract.contract import Contract, Rotary
from kvpact.contract.convert import TORCH_DTYPES, Converter, RotationCache
from kvpact.contract.identity import contract_digest
from kvpact.contract.rotation import lane_permutation
from kvpact.contract.tables import table_at
from kvpact.handoff.messages import HandoffTerms
from kvpact.handoff.terms import make_terms
from kvpact.types import FrequencyPolicy, KeyState, LaneOrder
from tests.handoff_fakes import READER, WRITER, make_handoff_id
from tests.reference_cache import in_lane_order, pack_layer, stored_keys
from tests.reference_model import decode, prefill, rotated

Rows = list[torch.Tensor]
"""One [T, H, D] for each layer."""


def frozen_at(contract: Contract, length: int) -> Contract:
    """The same model with the one table that each layer has for requests of `length` tokens."""
    groups = tuple(
        replace(group, rotary=_frozen(group.rotary, length, contract.model.context_tokens))
        for group in contract.layer_groups
    )
    return replace(contract, layer_groups=groups)


def _frozen(rotary: Rotary, length: int, context: int) -> Rotary:
    if rotary.key_state is KeyState.NONE:
        return rotary
    table = table_at(rotary, length=length, context_tokens=context)
    assert table is not None
    tables = (replace(table, upper_length=None),)
    return replace(rotary, tables=tables, formula=None, frequency_policy=FrequencyPolicy.FROZEN)


def handed_over(
    writer: Contract,
    reader: Contract,
    keys: Rows,
    values: Rows,
    *,
    positions: list[int] | None = None,
    table_length: int | None = None,
) -> tuple[Rows, Rows]:
    """Raw half-split keys and values as `writer` stores them, landed at `reader`.

    Keys come back half-split and in the reader's key state, both in float64.
    """
    tokens = len(keys[0])
    positions = list(range(tokens)) if positions is None else positions
    written = writer if table_length is None else frozen_at(writer, table_length)
    converter, rotations = Converter(writer, reader), RotationCache(table_length=table_length)
    landed_keys, landed_values = [], []
    for layer in range(writer.layer_count()):
        raw = in_lane_order(keys[layer], writer.group_of(layer).rotary)
        v_THD = values[layer].to(TORCH_DTYPES[writer.layout.value_dtype])
        landed = converter.land(
            layer,
            *pack_layer(stored_keys(raw, written, positions, layer), v_THD, writer.layout),
            writer_block_start=0,
            writer_block_count=-(-tokens // writer.layout.block_size),
            positions_T=torch.tensor(positions),
            rotations=rotations,
        )
        landed_keys.append(half_split(landed.keys.double(), reader, layer))
        landed_values.append(landed.values.double())
    return landed_keys, landed_values


def half_split(k_THD: torch.Tensor, contract: Contract, layer: int) -> torch.Tensor:
    """Keys that `contract` stores, in half-split order."""
    group = contract.group_of(layer)
    lanes = lane_permutation(group.rotary, LaneOrder.HALF_SPLIT, group.key_dim)
    return k_THD if lanes is None else k_THD[..., list(lanes)]


def terms_of(
    contract: Contract,
    tokens: int,
    *,
    positions: list[int] | None = None,
    table_length: int | None = None,
    number: int = 1,
) -> HandoffTerms:
    """Terms of a prompt 0, 1, 2 ...; tables are those of the longest request unless a length is given."""
    return make_terms(
        handoff_id=make_handoff_id(number),
        writer=WRITER,
        reader=READER,
        contract=contract,
        contract_digest=contract_digest(contract),
        token_ids=range(tokens),
        table_length=contract.model.context_tokens if table_length is None else table_length,
        positions=positions,
    )


def decoded(
    contract: Contract, seed: int, x_TE: torch.Tensor, cache: tuple[Rows, Rows], start: int
) -> torch.Tensor:
    """Outputs of the tokens from `start` on, one at a time, over a cache that grows by its own keys."""
    own = prefill(contract, seed, x_TE)
    outputs = []
    for token in range(start, len(x_TE)):
        later = list(range(start, token))
        keys, values = [], []
        for layer, (landed_k, landed_v) in enumerate(zip(*cache, strict=True)):
            group, own_k = contract.group_of(layer), own.keys[layer][start:token]
            raw = group.rotary.key_state is KeyState.RAW
            keys.append(torch.cat((landed_k, own_k if raw else rotated(group, own_k, later))))
            values.append(torch.cat((landed_v, own.values[layer][start:token])))
        outputs.append(decode(contract, seed, x_TE[token], keys, values))
    return torch.stack(outputs)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((found - expected).abs().max())
