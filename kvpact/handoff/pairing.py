"""Pairs: which writers offered which contract to this reader, and what the reader said."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from kvpact.errors import BadRequest, ContractRefused, Fenced
from kvpact.handoff.codec import contract_from_bytes
from kvpact.handoff.messages import HandoffTerms, PairOffer
from kvpact.types import (
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    FrequencyPolicy,
    IdentityRelation,
    Relation,
    Verdict,
    VerdictWord,
    WorkerLife,
)

K = TypeVar("K")
V = TypeVar("V")
KNOWN_CONTRACTS = 256
KNOWN_WRITERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A writer's contract with the reader's verdict on it."""

    contract: Contract
    verdict: Verdict


class PairBook:
    """What this reader said about each contract; bounded, the least recently offered goes first."""

    def __init__(self, contract: Contract, policy: Policy) -> None:
        _require_identities(contract)
        self._contract = contract
        self._policy = policy
        self._digest = contract_digest(contract)
        self._judged: OrderedDict[ContractDigest, Judged] = OrderedDict()
        self._writers: OrderedDict[str, tuple[WorkerLife, ContractDigest]] = OrderedDict()

    def offer(self, offer: PairOffer) -> Verdict:
        """The verdict on a contract, judged once per digest; the reader's contract and policy never change.

        Raises:
            BadRequest: the contract is malformed, names no identity, or isn't the one that its digest names.
        """
        judged = self._judged.get(offer.contract_digest) or self._judge(offer)
        _keep(self._judged, offer.contract_digest, judged, KNOWN_CONTRACTS)
        _keep(self._writers, offer.writer.worker, (offer.writer, offer.contract_digest), KNOWN_WRITERS)
        return judged.verdict

    def usable(self, terms: HandoffTerms) -> Judged:
        """The pair that terms belong to, if the reader can use its cache.

        Raises:
            ContractRefused: the contract was refused, or was never offered.
            Fenced: the writer paired in another life.
        """
        paired_life, paired_digest = self._writers.get(terms.writer.worker, (None, None))
        judged = self._judged.get(terms.contract_digest)
        if judged is None or paired_life is None or paired_digest != terms.contract_digest:
            verdict = _never_offered(terms.contract_digest, self._digest)
            raise ContractRefused("this contract was never offered; pair first", verdict=verdict)
        if paired_life != terms.writer:
            raise Fenced(
                f"writer {terms.writer.worker} paired in another life",
                expected=paired_life.incarnation.hex(),
                found=terms.writer.incarnation.hex(),
            )
        verdict = self._at_length(judged, terms.table_length)
        if verdict.word is VerdictWord.REJECT:
            fields = sorted({d.field for d in verdict.differences if d.action is DifferenceAction.REJECT})
            raise ContractRefused(f"the pair was refused: {', '.join(fields)}", verdict=verdict)
        return Judged(contract=judged.contract, verdict=verdict)

    def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """A verdict given before.

        Raises:
            BadRequest: there is none for these digests.
        """
        judged = self._judged.get(writer_digest)
        if judged is None or reader_digest != self._digest:
            raise BadRequest("there is no verdict for these digests", param="writer_digest")
        return judged.verdict

    def _at_length(self, judged: Judged, table_length: int) -> Verdict:
        """The pair's verdict, judged again where tables depend on the request's length."""
        groups = judged.contract.layer_groups + self._contract.layer_groups
        if all(group.rotary.frequency_policy is FrequencyPolicy.FROZEN for group in groups):
            return judged.verdict
        return compare(judged.contract, self._contract, self._policy, table_length)

    def _judge(self, offer: PairOffer) -> Judged:
        writer = contract_from_bytes(offer.contract, schema_major=offer.schema_major)
        _require_identities(writer)
        found = contract_digest(writer)
        if found != offer.contract_digest:
            raise BadRequest(
                f"contract_digest is {offer.contract_digest.hex()}; the contract's digest is {found.hex()}",
                param="contract_digest",
            )
        reach = pairing_reach(writer, self._contract)
        return Judged(contract=writer, verdict=compare(writer, self._contract, self._policy, reach))


def _require_identities(contract: Contract) -> None:
    for field in ("function_digest", "lm_head_digest", "tokenizer_digest"):
        if getattr(contract.model, field) is None:
            raise BadRequest(
                f"contract.model.{field} is absent; a running pair names its function", param=field
            )


def _never_offered(writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
    difference = Difference(
        field="contract_digest",
        layers=(),
        writer=writer_digest.hex(),
        reader="never offered",
        relation=Relation.INCOMPATIBLE,
        action=DifferenceAction.REJECT,
        remedy="connect the prefill worker to this decode worker first",
    )
    return Verdict(
        word=VerdictWord.REJECT,
        identity=IdentityRelation.NOT_COMPARED,
        differences=(difference,),
        plan=(),
        exactness=Exactness.BIT_EXACT,
        writer_digest=writer_digest,
        reader_digest=reader_digest,
    )


def _keep(book: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)
