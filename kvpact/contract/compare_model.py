"""Compares schema and model: the version of the form, and whether both sides are one function."""

from __future__ import annotations

from kvpact.contract.contract import KNOWN_FEATURES, SCHEMA_MAJOR, Contract, ModelIdentity
from kvpact.contract.describe import describe_digest
from kvpact.contract.findings import Finding
from kvpact.types import IdentityRelation, Relation

_DIGEST_MATTERS = {
    "function_digest": "the sides run different weights or different functions of them",
    "lm_head_digest": "the first token comes from the prefill side's output head",
    "tokenizer_digest": "the same token ids stand for different text",
}


def compare_schema(writer: Contract, reader: Contract) -> list[Finding]:
    """Schema versions and the features that a reader must know."""
    findings: list[Finding] = []
    majors = writer.schema.major, reader.schema.major
    if majors != (SCHEMA_MAJOR, SCHEMA_MAJOR):
        why = f"this release knows schema {SCHEMA_MAJOR}"
        findings.append(_finding("schema_major", str(majors[0]), str(majors[1]), Relation.INCOMPATIBLE, why))
    wanted = set(writer.schema.required_features), set(reader.schema.required_features)
    unknown = (wanted[0] | wanted[1]) - KNOWN_FEATURES
    if unknown:
        texts = _names(wanted[0] & unknown), _names(wanted[1] & unknown)
        why = f"this release doesn't know {_names(unknown)}"
        findings.append(_finding("required_features", *texts, Relation.INCOMPATIBLE, why))
    return findings


def compare_model(writer: ModelIdentity, reader: ModelIdentity) -> list[Finding]:
    """Architecture, known digests, compute dtype and context. Names and revisions are for people only."""
    findings: list[Finding] = []
    if writer.architecture != reader.architecture:
        texts = writer.architecture, reader.architecture
        findings.append(_finding("architecture", *texts, Relation.INCOMPATIBLE))
    for field, ours, theirs in _digests(writer, reader):
        if ours is not None and theirs is not None and ours != theirs:
            texts = describe_digest(ours), describe_digest(theirs)
            findings.append(_finding(field, *texts, Relation.INCOMPATIBLE, _DIGEST_MATTERS[field]))
    if writer.compute_dtype is not reader.compute_dtype:
        why = "results agree within rounding only"
        findings.append(
            _finding("compute_dtype", writer.compute_dtype, reader.compute_dtype, Relation.NOTED, why)
        )
    if writer.context_tokens != reader.context_tokens:
        texts = f"{writer.context_tokens} tokens", f"{reader.context_tokens} tokens"
        findings.append(_finding("context", *texts, Relation.NOTED))
    return findings


def compare_identity(writer: ModelIdentity, reader: ModelIdentity) -> IdentityRelation:
    """DIFFERENT if a digest known to both differs, else NOT_COMPARED if one is unknown, else EQUAL."""
    pairs = [(ours, theirs) for _, ours, theirs in _digests(writer, reader)]
    unknown = [ours is None or theirs is None for ours, theirs in pairs]
    if any(not gap and ours != theirs for gap, (ours, theirs) in zip(unknown, pairs, strict=True)):
        return IdentityRelation.DIFFERENT
    return IdentityRelation.NOT_COMPARED if any(unknown) else IdentityRelation.EQUAL


def _digests(
    writer: ModelIdentity, reader: ModelIdentity
) -> tuple[tuple[str, bytes | None, bytes | None], ...]:
    return (
        ("function_digest", writer.function_digest, reader.function_digest),
        ("lm_head_digest", writer.lm_head_digest, reader.lm_head_digest),
        ("tokenizer_digest", writer.tokenizer_digest, reader.tokenizer_digest),
    )


def _finding(field: str, writer: str, reader: str, relation: Relation, explanation: str = "") -> Finding:
    return Finding(field=field, writer=writer, reader=reader, relation=relation, explanation=explanation)


def _names(features: set[str]) -> str:
    return ", ".join(sorted(features)) or "none"
