"""What a captured handoff says, computed again: verdict, costs, checksums, outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpact.contract.compare import Policy, compare_at, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from kvpact.contract.jsonform import contract_to_json, verdict_to_json
from kvpact.contract.ledger import Ledger, ledger
from kvpact.handoff.capture import Capture
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.messages import Chunk, HandoffTerms
from kvpact.types import FrequencyPolicy, Verdict, VerdictWord


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFacts:
    """A capture with what follows from it and from the reader that it is judged for."""

    capture: Capture
    writer: Contract
    reader: Contract
    verdict: Verdict
    costs: Ledger | None
    """None where no prompt was named."""
    digest_holds: bool
    """Whether the contract that was offered has the digest that was named."""

    @property
    def terms(self) -> HandoffTerms | None:
        """Terms of the handoff, if it came to that."""
        return None if self.capture.reserved is None else self.capture.reserved.terms

    def checksum_holds(self, chunk: Chunk) -> bool:
        """Whether the bytes of a chunk are those that its writer summed up."""
        terms = self.terms
        assert terms is not None, "chunks follow a reservation"
        digests = terms.contract_digest, terms.token_digest
        return chunk_checksum(chunk.header, *digests, chunk.keys, chunk.values) == chunk.checksum

    def outcome(self) -> str:
        """How the handoff ended when it was recorded."""
        if self.capture.receipt is not None:
            return "committed"
        if self.capture.error is not None:
            return f"failed: {self.capture.error}"
        return "refused" if self.capture.answer.verdict.word is VerdictWord.REJECT else "not reserved"


def handoff_facts(capture: Capture, reader: Contract | None) -> HandoffFacts:
    """Facts for `reader`, or for the reader that was recorded. Raises BadRequest for a malformed contract."""
    writer, judge = capture.writer_contract(), reader or capture.answer.reader_contract
    terms = None if capture.reserved is None else capture.reserved.terms
    reach = pairing_reach(writer, judge)
    policies = {group.rotary.frequency_policy for group in writer.layer_groups + judge.layer_groups}
    if terms is not None and policies != {FrequencyPolicy.FROZEN}:
        reach = terms.table_length
    return HandoffFacts(
        capture=capture,
        writer=writer,
        reader=judge,
        verdict=compare_at(writer, judge, Policy(), reach),
        costs=None if terms is None else ledger(writer, len(terms.token_ids)),
        digest_holds=contract_digest(writer) == capture.offer.contract_digest,
    )


def facts_to_json(facts: HandoffFacts) -> dict[str, Any]:
    """One object; digests, ids and checksums in hexadecimal."""
    from kvpact.cli.ledger_table import ledger_to_json

    commit, error = facts.capture.commit(), facts.capture.error
    return {
        "contract": contract_to_json(facts.writer),
        "contract_digest_holds": facts.digest_holds,
        "reader_contract": contract_to_json(facts.reader),
        "recorded_verdict": facts.capture.answer.verdict.word.value,
        **verdict_to_json(facts.verdict),
        "exactness": facts.verdict.exactness.value,
        "terms": None if facts.terms is None else _terms_to_json(facts.terms),
        "ledger": None if facts.costs is None else ledger_to_json(facts.costs),
        "witnesses": [
            {"layer": witness.layer, "position": witness.position}
            for witness in (() if commit is None else commit.witnesses)
        ],
        "chunks": [
            _chunk_to_json(chunk, holds=facts.checksum_holds(chunk)) for chunk in facts.capture.chunks()
        ],
        "outcome": facts.outcome(),
        "error": error and {"reason": error.reason, "message": str(error)} | error.metadata(),
    }


def _terms_to_json(terms: HandoffTerms) -> dict[str, Any]:
    return {
        "handoff_id": terms.handoff_id.hex(),
        "token_ids": list(terms.token_ids),
        "positions": [{"start": run.start, "count": run.count} for run in terms.positions],
        "next_position": terms.next_position,
        "table_length": terms.table_length,
        "required": [
            {"group": entry.group, "start": entry.start, "end": entry.end} for entry in terms.required
        ],
    }


def _chunk_to_json(chunk: Chunk, *, holds: bool) -> dict[str, Any]:
    header = chunk.header
    return {
        "sequence": header.sequence,
        "layer": header.layer,
        "block_start": header.block_start,
        "block_count": header.block_count,
        "key_bytes": header.key_bytes,
        "value_bytes": header.value_bytes,
        "checksum": f"{chunk.checksum:016x}",
        "checksum_holds": holds,
    }
