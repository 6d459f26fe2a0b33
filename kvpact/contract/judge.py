"""Verdicts where tables depend on length: what holds when two sides pair, and what holds for one request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kvpact.contract.compare import Policy, compare_at, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.findings import REMEDIES
from kvpact.types import Difference, DifferenceAction, FrequencyPolicy, Relation, Verdict, VerdictWord

LENGTH_FIELDS = frozenset({"frequency_policy", "inv_freq", "amplitude", "key_state"})
"""Fields whose verdict may be another at another length."""
KEPT_VERDICTS = 64
"""Verdicts that a book keeps; the one that was asked for least recently goes first."""


def judge_pair(writer: Contract, reader: Contract, policy: Policy) -> Verdict:
    """The verdict at pairing: that of the longest requests which the pair can serve.

    A pair whose tables part at some length only is not refused: its verdict notes the length, and longer
    requests are refused one by one when they are reserved.
    """
    verdict = compare_at(writer, reader, policy, pairing_reach(writer, reader))
    if verdict.word is not VerdictWord.REJECT or not _only_by_length(verdict):
        return verdict
    for length in reversed(_switches(writer, reader)):
        shorter = compare_at(writer, reader, policy, length)
        if shorter.word is not VerdictWord.REJECT:
            return _noted(shorter, verdict, length)
    return verdict


def judge_at(writer: Contract, reader: Contract, policy: Policy, table_length: int) -> Verdict:
    """The verdict for one request of `table_length` tokens."""
    return compare_at(writer, reader, policy, table_length)


def depends_on_length(writer: Contract, reader: Contract) -> bool:
    """Whether a request's length can change the verdict."""
    rotaries = [group.rotary for group in writer.layer_groups + reader.layer_groups]
    bounded = any(table.upper_length is not None for rotary in rotaries for table in rotary.tables)
    return bounded or any(rotary.frequency_policy is not FrequencyPolicy.FROZEN for rotary in rotaries)


class LengthBook:
    """Verdicts of one pair by length, so that a request on a known pair isn't compared anew.

    Between two switches of tables the same tables run, and what holds for the longest request there holds for
    the shorter ones; only where that one is refused is a request judged at its very length. So it is also
    where a formula gives each length a table of its own.
    """

    def __init__(self, writer: Contract, reader: Contract, policy: Policy, pairing: Verdict) -> None:
        self._sides = writer, reader
        self._policy = policy
        self._pairing = pairing
        self._longest = pairing_reach(writer, reader)
        self._switches = _switches(writer, reader) if depends_on_length(writer, reader) else None
        self._shared_up_to = _shared_up_to(writer, reader)
        self._known: OrderedDict[int, Verdict] = OrderedDict()

    def verdict(self, table_length: int) -> Verdict:
        """The verdict for a request of `table_length` tokens."""
        if self._switches is None:
            return self._pairing
        upper = self._upper(table_length)
        verdict = self._at(upper)
        return verdict if verdict.word is not VerdictWord.REJECT else self._at(table_length)

    def _upper(self, table_length: int) -> int:
        """The longest request that is known to run the tables of one of `table_length` tokens."""
        if self._shared_up_to is not None and table_length > self._shared_up_to:
            return table_length
        uppers = (switch for switch in self._switches or () if table_length <= switch)
        return next(uppers, max(self._longest, table_length))

    def _at(self, length: int) -> Verdict:
        if length not in self._known:
            self._known[length] = judge_at(*self._sides, self._policy, length)
        self._known.move_to_end(length)
        verdict = self._known[length]
        while len(self._known) > KEPT_VERDICTS:
            self._known.popitem(last=False)
        return verdict


def _only_by_length(verdict: Verdict) -> bool:
    refused = {part.field for part in verdict.differences if part.action is DifferenceAction.REJECT}
    return refused <= LENGTH_FIELDS


def _switches(writer: Contract, reader: Contract) -> list[int]:
    """Lengths within reach after which a side takes another table, ascending."""
    longest = pairing_reach(writer, reader)
    groups = writer.layer_groups + reader.layer_groups
    uppers = {table.upper_length for group in groups for table in group.rotary.tables}
    return sorted(upper for upper in uppers if upper is not None and upper < longest)


def _shared_up_to(writer: Contract, reader: Contract) -> int | None:
    """The longest length at which no formula gives the table; None: there is no formula."""
    groups = writer.layer_groups + reader.layer_groups
    rotaries = [group.rotary for group in groups if group.rotary.formula is not None]
    uppers = [rotary.tables[-1].upper_length if rotary.tables else None for rotary in rotaries]
    return min((upper or 0 for upper in uppers), default=None)


def _noted(shorter: Verdict, longest: Verdict, length: int) -> Verdict:
    """The verdict of short requests, with what stands against longer ones."""
    texts = {(part.writer, part.reader) for part in longest.differences if part.field == "frequency_policy"}
    writer, reader = min(texts, default=("see inv_freq", "see inv_freq"))
    kept = [part for part in shorter.differences if part.field != "frequency_policy"]
    note = Difference(
        field="frequency_policy",
        layers=tuple(sorted({layer for part in longest.differences for layer in part.layers})),
        writer=writer,
        reader=reader,
        relation=Relation.NOTED,
        action=DifferenceAction.ACCEPT,
        remedy=REMEDIES["frequency_policy"],
        explanation=f"requests of more than {length} tokens are refused when they are reserved",
    )
    order = list(REMEDIES)
    differences = sorted((*kept, note), key=lambda part: order.index(part.field))
    return replace(shorter, differences=tuple(differences))
