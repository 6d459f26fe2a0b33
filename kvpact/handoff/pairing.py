"""Pairs: which writers offered which contract to this reader, and what the reader said."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TypeVar

from kvpact.contract.canary import probe_lengths
from kvpact.contract.compare import Policy
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from kvpact.contract.judge import LengthBook, judge_pair
from kvpact.errors import BadRequest, ContractRefused, DataLoss, Fenced
from kvpact.handoff.chunks import PAYLOAD_CAP_BYTES, layer_blocks
from kvpact.handoff.codec import contract_from_bytes
from kvpact.handoff.messages import HandoffTerms, PairOffer
from kvpact.types import (
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offered:
    """What a writer offered last, and the lengths whose probes it passed since."""

    life: WorkerLife
    digest: ContractDigest
    passed: frozenset[int] = frozenset()


class PairBook:
    """What this reader said about each contract; bounded, the least recently offered goes first."""

    def __init__(self, contract: Contract, policy: Policy) -> None:
        _require_identities(contract)
        self._contract = contract
        self._policy = policy
        self._digest = contract_digest(contract)
        self._judged: OrderedDict[ContractDigest, Judged] = OrderedDict()
        self._by_length: OrderedDict[ContractDigest, LengthBook] = OrderedDict()
        self._writers: OrderedDict[str, _Offered] = OrderedDict()
        self._replaced: OrderedDict[WorkerLife, bool] = OrderedDict()
        """Lives after which another one of the same writer paired."""

    def offer(self, offer: PairOffer) -> Verdict:
        """The verdict on a contract, judged once per digest; the reader's contract and policy never change.

        Raises:
            BadRequest: the contract is malformed, names no identity, or isn't the one that its digest names.
            Fenced: another life of this writer paired since.
        """
        self._fence(offer.writer)
        judged = self._judged.get(offer.contract_digest) or self._judge(offer)
        _keep(self._judged, offer.contract_digest, judged, KNOWN_CONTRACTS)
        offered = self._offered(offer.writer, offer.contract_digest)
        offered = offered or _Offered(life=offer.writer, digest=offer.contract_digest)
        before = self._writers.get(offer.writer.worker)
        if before is not None and before.life != offer.writer:
            _keep(self._replaced, before.life, True, KNOWN_WRITERS)
        _keep(self._writers, offer.writer.worker, offered, KNOWN_WRITERS)
        return judged.verdict

    def usable(self, terms: HandoffTerms) -> Judged:
        """The pair that terms belong to, if the reader can use its cache.

        Raises:
            ContractRefused: the contract was refused, or was never offered.
            Fenced: the writer paired in another life.
        """
        offered = self._writers.get(terms.writer.worker)
        judged = self._judged.get(terms.contract_digest)
        if judged is None or offered is None or offered.digest != terms.contract_digest:
            verdict = _never_offered(terms.contract_digest, self._digest)
            raise ContractRefused("this contract was never offered; pair first", verdict=verdict)
        if offered.life != terms.writer:
            raise Fenced(
                f"writer {terms.writer.worker} paired in another life",
                expected=offered.life.incarnation.hex(),
                found=terms.writer.incarnation.hex(),
            )
        verdict = judged.verdict
        if verdict.word is not VerdictWord.REJECT:
            verdict = self._at_length(terms.contract_digest, judged, terms.table_length)
        if verdict.word is VerdictWord.REJECT:
            fields = sorted({d.field for d in verdict.differences if d.action is DifferenceAction.REJECT})
            raise ContractRefused(f"the pair was refused: {', '.join(fields)}", verdict=verdict)
        return Judged(contract=judged.contract, verdict=verdict)

    def require_probe(self, terms: HandoffTerms) -> None:
        """Raises DataLoss until the pair passed a probe for each length that it owes one; it may owe none."""
        offered = self._offered(terms.writer, terms.contract_digest)
        owed = probe_lengths(self._judged[terms.contract_digest].contract, self._contract)
        if offered is None or not offered.passed.issuperset(owed):
            raise DataLoss(
                f"the pair with {terms.writer.worker} hasn't passed its probe; probe it first", check="canary"
            )

    def probed(self, terms: HandoffTerms, *, passed: bool) -> None:
        """Notes how the probe that `terms` reserved went. One that fails takes back what others proved."""
        offered = self._offered(terms.writer, terms.contract_digest)
        if offered is not None:
            lengths = offered.passed | {terms.table_length} if passed else frozenset()
            self._writers[terms.writer.worker] = replace(offered, passed=lengths)

    def doubt(self, terms: HandoffTerms) -> None:
        """Makes the pair prove itself by another probe, since bytes or rows of this handoff were refused."""
        self.probed(terms, passed=False)

    def _fence(self, writer: WorkerLife) -> None:
        """Turns away an offer that comes late: it would end what the writer's life of now reserved."""
        now = self._writers.get(writer.worker)
        if now is not None and writer in self._replaced:
            raise Fenced(
                f"writer {writer.worker} paired in another life since",
                expected=now.life.incarnation.hex(),
                found=writer.incarnation.hex(),
            )

    def _offered(self, life: WorkerLife, digest: ContractDigest) -> _Offered | None:
        offered = self._writers.get(life.worker)
        return offered if offered and (offered.life, offered.digest) == (life, digest) else None

    def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """A verdict given before.

        Raises:
            BadRequest: there is none for these digests.
        """
        judged = self._judged.get(writer_digest)
        if judged is None or reader_digest != self._digest:
            raise BadRequest("there is no verdict for these digests", param="writer_digest")
        return judged.verdict

    def _at_length(self, digest: ContractDigest, judged: Judged, table_length: int) -> Verdict:
        """The pair's verdict for one request, judged once for all lengths that run the same tables."""
        book = self._by_length.get(digest)
        if book is None:
            book = LengthBook(judged.contract, self._contract, self._policy, judged.verdict)
            _keep(self._by_length, digest, book, KNOWN_CONTRACTS)
        return book.verdict(table_length)

    def _judge(self, offer: PairOffer) -> Judged:
        writer = contract_from_bytes(offer.contract, schema_major=offer.schema_major)
        _require_identities(writer)
        found = contract_digest(writer)
        if found != offer.contract_digest:
            raise BadRequest(
                f"contract_digest is {offer.contract_digest.hex()}; the contract's digest is {found.hex()}",
                param="contract_digest",
            )
        verdict = judge_pair(writer, self._contract, self._policy)
        return Judged(contract=writer, verdict=_with_message_limit(verdict, writer))


def _with_message_limit(verdict: Verdict, writer: Contract) -> Verdict:
    """Refuses a writer whose blocks don't fit into a message, here and not at each request."""
    layers = [blocks.layer for blocks in layer_blocks(writer, ()) if blocks.block_bytes > PAYLOAD_CAP_BYTES]
    if not layers:
        return verdict
    size = writer.layout.block_size
    difference = Difference(
        field="block_size",
        layers=tuple(layers),
        writer=str(size),
        reader=f"at most {PAYLOAD_CAP_BYTES} bytes for one block's keys and values",
        relation=Relation.INCOMPATIBLE,
        action=DifferenceAction.REJECT,
        remedy="choose a smaller block_size on the prefill side: prefill.cache.block_size or --prefill-cache",
        explanation="a block travels in one message",
    )
    others = tuple(each for each in verdict.differences if each.field != "block_size")
    return replace(verdict, word=VerdictWord.REJECT, differences=(*others, difference), plan=())


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
