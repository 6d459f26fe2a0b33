"""Compares how bytes lie: axes, blocks, number formats, shards."""

from __future__ import annotations

from kvpact.contract.contract import Contract, Layout
from kvpact.contract.describe import describe_quantization, describe_shard
from kvpact.contract.findings import Finding
from kvpact.types import QuantizationScheme, Relation, ScaleSource

_NOT_YET = "no conversion is known"


def compare_layout(writer: Contract, reader: Contract) -> list[Finding]:
    """Every layout field on which the sides differ."""
    ours, theirs = writer.layout, reader.layout
    movable = _scales_stay_put(ours) and _scales_stay_put(theirs)
    findings = _moved("axis_order", ours.axis_order, theirs.axis_order, movable)
    findings += _moved("block_size", str(ours.block_size), str(theirs.block_size), movable)
    findings += _fixed("packing", ours.packing, theirs.packing)
    findings += _fixed("byte_order", ours.byte_order, theirs.byte_order)
    if ours.shard != theirs.shard and not (_holds_all(writer) and _holds_all(reader)):
        findings += _fixed("shard", describe_shard(ours.shard), describe_shard(theirs.shard))
    findings += _fixed("key_dtype", ours.key_dtype, theirs.key_dtype)
    findings += _fixed("value_dtype", ours.value_dtype, theirs.value_dtype)
    if ours.key_quantization != theirs.key_quantization:
        texts = describe_quantization(ours.key_quantization), describe_quantization(theirs.key_quantization)
        findings.append(_refused("key_quantization", *texts))
    if ours.value_quantization != theirs.value_quantization:
        texts = (
            describe_quantization(ours.value_quantization),
            describe_quantization(theirs.value_quantization),
        )
        findings.append(_refused("value_quantization", *texts))
    return findings


def _moved(field: str, writer: str, reader: str, movable: bool) -> list[Finding]:
    if writer == reader:
        return []
    if not movable:
        return [_refused(field, writer, reader)]
    return [Finding(field=field, writer=writer, reader=reader, relation=Relation.CONVERTIBLE)]


def _fixed(field: str, writer: str, reader: str) -> list[Finding]:
    return [] if writer == reader else [_refused(field, writer, reader)]


def _refused(field: str, writer: str, reader: str) -> Finding:
    return Finding(
        field=field, writer=writer, reader=reader, relation=Relation.INCOMPATIBLE, explanation=_NOT_YET
    )


def _scales_stay_put(layout: Layout) -> bool:
    """Whether tokens can move between blocks without scales that move along."""
    return all(
        quantization.scheme is QuantizationScheme.NONE or quantization.scale_source is ScaleSource.FIXED
        for quantization in (layout.key_quantization, layout.value_quantization)
    )


def _holds_all(contract: Contract) -> bool:
    shard = contract.layout.shard
    heads = max((group.kv_heads for group in contract.layer_groups), default=0)
    layers = max((layer + 1 for group in contract.layer_groups for layer in group.layers), default=0)
    whole_heads = shard.head_start <= 0 and shard.head_end >= heads
    return (
        shard.tensor_parallel_size == 1
        and whole_heads
        and shard.layer_start <= 0 <= layers <= shard.layer_end
    )
