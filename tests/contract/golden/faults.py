"""What a faulty writer makes of an honest push, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.messages import Chunk, Commit, HandoffTerms, Open, PushPart
from kvpact.types import ContractDigest, HandoffId
from tests.contract.golden.cases import Fault

OTHER_ID, OTHER_DIGEST = HandoffId(b"another handoff!"), ContractDigest(b"another contract" * 2)
HEADERS: dict[Fault, dict[str, Any]] = {
    Fault.CHUNK_OTHER_GENERATION: {"generation": 9},
    Fault.CHUNK_OTHER_HANDOFF: {"handoff_id": OTHER_ID},
    Fault.CHUNK_OTHER_LAYER: {"layer": 7},
    Fault.CHUNK_BEHIND_END: {"block_start": 60},
}
"""What the last chunk's header says instead; its checksum is that of what it says."""
COMMITS: dict[Fault, dict[str, int]] = {
    Fault.ONE_CHUNK_MORE: {"chunk_count": 1},
    Fault.ONE_BYTE_MORE: {"payload_bytes": 1},
}
"""What the commit tells too much."""


def faulty(fault: Fault, terms: HandoffTerms, parts: Sequence[PushPart]) -> list[PushPart]:
    """The parts as the writer sends them: open, at least two chunks, commit."""
    opened, *chunks, commit = parts
    assert isinstance(opened, Open)
    assert isinstance(commit, Commit)
    last = chunks[-1]
    assert isinstance(last, Chunk)
    if fault in HEADERS:
        return [opened, *chunks[:-1], _summed(terms, _headed(last, **HEADERS[fault])), commit]
    if fault in COMMITS:
        more = {name: getattr(commit, name) + count for name, count in COMMITS[fault].items()}
        return [opened, *chunks, replace(commit, **more)]
    match fault:
        case Fault.OPEN_OTHER_GENERATION:
            opened = replace(opened, generation=opened.generation + 1)
        case Fault.OPEN_OTHER_CONTRACT:
            opened = replace(opened, contract_digest=OTHER_DIGEST)
        case Fault.OPEN_TWICE:
            chunks.insert(1, opened)
        case Fault.FLIP_BYTE:
            chunks[-1] = replace(last, keys=bytes([bytes(last.keys)[0] ^ 1]) + bytes(last.keys)[1:])
        case Fault.SWAP_CHUNKS:
            chunks[0], chunks[1] = chunks[1], chunks[0]
        case Fault.NO_COMMIT:
            return [opened, *chunks]
        case Fault.CHUNK_OTHER_SIZE:
            half = len(last.keys) // 2
            shorter = replace(last, keys=bytes(last.keys)[:half])
            chunks[-1] = _summed(terms, _headed(shorter, key_bytes=half))
        case Fault.CHUNK_TWICE | Fault.LEAVE_CHUNK_OUT:
            return [opened, *_recounted(fault, terms, chunks, last, commit)]
        case Fault.WITNESS_LEFT_OUT:
            commit = replace(commit, witnesses=commit.witnesses[1:])
        case Fault.WITNESS_OF_OTHER_ROW:
            first, second, *others = commit.witnesses
            commit = replace(commit, witnesses=(replace(first, value=second.value), second, *others))
    return [opened, *chunks, commit]


def _recounted(
    fault: Fault, terms: HandoffTerms, chunks: list[PushPart], last: Chunk, commit: Commit
) -> list[PushPart]:
    """A chunk more or less than asked for, and totals that hold."""
    if fault is Fault.CHUNK_TWICE:
        again = _summed(terms, _headed(last, sequence=last.header.sequence + 1))
        chunks, sign = [*chunks, again], 1
    else:
        chunks, sign = chunks[:-1], -1
    size_bytes = len(last.keys) + len(last.values)
    commit = replace(commit, chunk_count=len(chunks), payload_bytes=commit.payload_bytes + sign * size_bytes)
    return [*chunks, commit]


def _headed(chunk: Chunk, **says: Any) -> Chunk:
    return replace(chunk, header=replace(chunk.header, **says))


def _summed(terms: HandoffTerms, chunk: Chunk) -> Chunk:
    digests = terms.contract_digest, terms.token_digest
    return replace(chunk, checksum=chunk_checksum(chunk.header, *digests, chunk.keys, chunk.values))
