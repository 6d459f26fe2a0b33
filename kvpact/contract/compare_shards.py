"""Compares shards: whether the heads and layers that the writers hold cover those of the reader."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.contract.contract import Contract
from kvpact.contract.describe import describe_shard
from kvpact.contract.findings import Finding
from kvpact.contract.numbers import key_form, value_form
from kvpact.contract.shards import obstacle_to_splits, uncovered, widest_heads
from kvpact.types import QuantizationGranularity, Relation, ScaleSource


def compare_shards(writers: Sequence[Contract], reader: Contract) -> list[Finding]:
    """At most one finding, named shard; all writers count, since they cover the reader together or not."""
    same = all(_same(writer, reader) for writer in writers)
    obstacle = obstacle_to_splits((*writers, reader)) or ("" if same else uncovered(writers, reader))
    if same and not obstacle:
        return []
    obstacle = obstacle or _obstacle_of_scales((*writers, reader))
    relation = Relation.INCOMPATIBLE if obstacle else Relation.CONVERTIBLE
    why = obstacle or "heads and layers are taken from the writer of lowest rank that holds them"
    texts = (
        "; ".join(describe_shard(writer.layout.shard) for writer in writers),
        describe_shard(reader.layout.shard),
    )
    return [Finding(field="shard", writer=texts[0], reader=texts[1], relation=relation, explanation=why)]


def _obstacle_of_scales(contracts: Sequence[Contract]) -> str:
    forms = (
        form for contract in contracts for form in (key_form(contract.layout), value_form(contract.layout))
    )
    for form in forms:
        how = form.quantization
        if how.granularity is QuantizationGranularity.TENSOR and how.scale_source is ScaleSource.SHIPPED:
            return "a shipped scale per tensor holds for one shard only; ship one per head"
    return ""


def _same(writer: Contract, reader: Contract) -> bool:
    return writer.layout.shard == reader.layout.shard or (_holds_all(writer) and _holds_all(reader))


def _holds_all(contract: Contract) -> bool:
    shard, heads = contract.layout.shard, widest_heads(contract)
    layers = max((layer + 1 for group in contract.layer_groups for layer in group.layers), default=0)
    whole_heads = shard.head_start <= 0 and shard.head_end >= heads
    return (
        shard.tensor_parallel_size == 1
        and whole_heads
        and shard.layer_start <= 0 <= layers <= shard.layer_end
    )
