"""Compares how bytes lie: axes, blocks, packing, byte order, number formats."""

from __future__ import annotations

from kvpact.contract.contract import Contract
from kvpact.contract.describe import describe_quantization
from kvpact.contract.findings import Finding
from kvpact.contract.numbers import NumberForm, key_form, loses, value_form
from kvpact.types import Dtype, Relation

_MISREAD = "the same bytes read as {reader} are other numbers; widening to {reader} is exact"
_NARROWED = "{reader} doesn't hold every number of {writer}: a conversion rounds once more"
_SCALED = "stored numbers mean something under the writer's scales only; a conversion makes them anew"


def compare_layout(writer: Contract, reader: Contract) -> list[Finding]:
    """Every layout field but the shard on which the sides differ; each can be converted."""
    ours, theirs = writer.layout, reader.layout
    findings = _moved("axis_order", ours.axis_order, theirs.axis_order)
    findings += _moved("block_size", str(ours.block_size), str(theirs.block_size))
    findings += _moved("packing", ours.packing, theirs.packing)
    findings += _moved("byte_order", ours.byte_order, theirs.byte_order)
    findings += _compare_numbers("key", key_form(ours), key_form(theirs))
    findings += _compare_numbers("value", value_form(ours), value_form(theirs))
    return findings


def _moved(field: str, writer: str, reader: str) -> list[Finding]:
    if writer == reader:
        return []
    return [Finding(field=field, writer=writer, reader=reader, relation=Relation.CONVERTIBLE)]


def _compare_numbers(side: str, writer: NumberForm, reader: NumberForm) -> list[Finding]:
    findings: list[Finding] = []
    lossy = loses(writer, reader)
    if writer.dtype is not reader.dtype:
        findings.append(
            Finding(
                field=f"{side}_dtype",
                writer=writer.dtype,
                reader=reader.dtype,
                relation=Relation.CONVERTIBLE,
                lossy=lossy,
                explanation=_on_dtypes(writer.dtype, reader.dtype, lossy),
            )
        )
    if writer.quantization != reader.quantization:
        findings.append(
            Finding(
                field=f"{side}_quantization",
                writer=describe_quantization(writer.quantization),
                reader=describe_quantization(reader.quantization),
                relation=Relation.CONVERTIBLE,
                lossy=True,
                explanation=_SCALED,
            )
        )
    return findings


def _on_dtypes(writer: Dtype, reader: Dtype, lossy: bool) -> str:
    return (_NARROWED if lossy else _MISREAD).format(writer=writer, reader=reader)
