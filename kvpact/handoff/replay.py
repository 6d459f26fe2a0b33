"""A captured handoff told to another reader, and whether that one says what the recorded one said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from kvpact.contract.compare import Policy
from kvpact.contract.judge import judge_pair
from kvpact.errors import BadRequest, ContractRefused, DataLoss, Fenced, KvpactError
from kvpact.handoff.capture import Capture
from kvpact.handoff.messages import CommitReceipt, PairAnswer, PushPart, Reservation
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.status import status_from_bytes, status_to_bytes
from kvpact.types import Verdict, VerdictWord

ByChoice = Literal["convert", "reject"]
OnPart = Callable[[int], None]
"""Called with the number of parts that were pushed."""
OF_THE_MESSAGES = (BadRequest, ContractRefused, DataLoss)
"""Errors that follow from what was sent and from the contracts; others come of the reader's state."""
NOT_RESERVED = "not reserved"
ONLY_WORDS = (
    "reason and facts are the same, the message isn't: it names another place, or another release words it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a handoff went at one reader, as far as it got."""

    answer: PairAnswer | None
    """None where the offer itself was refused."""
    reserved: bool = False
    pushed: bool = False
    receipt: CommitReceipt | None = None
    error: KvpactError | None = None

    def outcome(self) -> str:
        """One word or two."""
        if self.receipt is not None:
            return "committed"
        if self.error is not None:
            step = "push" if self.pushed else "reserve" if self.answer is not None else "pair"
            return f"failed at {step}"
        return "reserved" if self.reserved else NOT_RESERVED

    def facts(self) -> dict[str, str]:
        """Everything that two readers must agree on, by name, as text."""
        facts = {"outcome": self.outcome()}
        if self.answer is not None:
            facts |= _verdict_facts(self.answer.verdict)
        if self.receipt is not None:
            facts |= _receipt_facts(self.receipt)
        if self.error is not None:
            facts["reason"] = self.error.reason
            facts |= {f"error.{name}": value for name, value in self.error.metadata().items()}
            facts["message"] = str(self.error)
        return facts

    def of_the_messages(self) -> bool:
        """Whether it follows from contracts and messages alone, so that every reader must end so."""
        error = self.error
        if error is None:
            return True
        if isinstance(error, Fenced):
            return self.pushed
        owes_probe = isinstance(error, DataLoss) and error.check == "canary"
        return isinstance(error, OF_THE_MESSAGES) and not owes_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact in which two endings differ; None where one has no such fact."""

    fact: str
    recorded: str | None
    replayed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A capture's own ending and that of the replay."""

    recorded: Ending
    replayed: Ending
    reservation: Reservation | None = None
    """What the replay's reader granted."""
    notes: tuple[str, ...] = field(default=())
    """What a person has to know to judge a difference."""

    def differences(self) -> tuple[Difference, ...]:
        """In the order of facts; empty where both ended the same."""
        one, other = self.recorded.facts(), self.replayed.facts()
        return tuple(
            Difference(fact=name, recorded=one.get(name), replayed=other.get(name))
            for name in _in_order(one, other)
            if one.get(name) != other.get(name)
        )


def recorded_ending(capture: Capture) -> Ending:
    """How the handoff went when it was recorded."""
    reserved = capture.reserved is not None and capture.reserved.reservation is not None
    return Ending(
        answer=capture.answer,
        reserved=reserved,
        pushed=bool(capture.parts),
        receipt=capture.receipt,
        error=capture.error,
    )


async def replay(capture: Capture, reader: ReaderPort, on_part: OnPart = lambda _: None) -> Replay:
    """Pairs, reserves and pushes as recorded.

    The reader goes by the recorded reader's name and life, and grants the recorded generation and nonce:
    writers put the one into every chunk, and the other picked the witnesses.
    """
    recorded = recorded_ending(capture)
    replayed, reservation = await _ending(capture, reader, on_part)
    notes = _notes(capture, recorded, reservation)
    done = Replay(recorded=recorded, replayed=replayed, reservation=reservation, notes=notes)
    if {each.fact for each in done.differences()} == {"message"}:
        return replace(done, notes=(*notes, ONLY_WORDS))
    return done


async def _ending(capture: Capture, reader: ReaderPort, on_part: OnPart) -> tuple[Ending, Reservation | None]:
    try:
        answer = await reader.pair(capture.offer)
    except KvpactError as error:
        return Ending(answer=None, error=_as_travelled(error)), None
    asked = capture.reserved
    if asked is None:
        return Ending(answer=answer), None
    try:
        reservation = await reader.reserve(asked.terms, asked.max_output_tokens)
    except KvpactError as error:
        return Ending(answer=answer, error=_as_travelled(error)), None
    if asked.reservation is None:
        return Ending(answer=answer, reserved=True), reservation
    try:
        receipt = await reader.push(_told(capture.parts, on_part))
    except KvpactError as error:
        failed = Ending(answer=answer, reserved=True, pushed=True, error=_as_travelled(error))
        return failed, reservation
    return Ending(answer=answer, reserved=True, pushed=True, receipt=receipt), reservation


def recorded_policy(capture: Capture) -> Policy:
    """The policy of the recorded reader, told by its verdict; the default where none explains it."""
    writer, answer = capture.writer_contract(), capture.answer
    choices: tuple[ByChoice, ...] = ("convert", "reject")
    for lossy, on_convertible in product(("reject", "allow"), choices):
        policy = Policy(on_convertible=on_convertible, lossy="allow" if lossy == "allow" else "reject")
        verdict = judge_pair(writer, answer.reader_contract, policy)
        if _verdict_facts(verdict) == _verdict_facts(answer.verdict):
            return policy
    return Policy()


async def _told(parts: tuple[PushPart, ...], on_part: OnPart) -> AsyncIterator[PushPart]:
    for index, part in enumerate(parts):
        yield part
        on_part(index + 1)


def _as_travelled(error: KvpactError) -> KvpactError:
    """The error as a writer would have got it, cut where the wire cuts it."""
    return status_from_bytes(status_to_bytes(error))


def _verdict_facts(verdict: Verdict) -> dict[str, str]:
    facts = {
        "verdict": verdict.word.value,
        "differences": ", ".join(f"{each.field} {each.action.value}" for each in verdict.differences),
    }
    if verdict.word is not VerdictWord.REJECT:
        facts["plan"] = ", ".join(step.op.value for step in verdict.plan)
        facts["exactness"] = verdict.exactness.value
    return facts


def _receipt_facts(receipt: CommitReceipt) -> dict[str, str]:
    facts = {
        "receipt.exactness": receipt.exactness.value,
        "receipt.plan": ", ".join(step.op.value for step in receipt.plan),
        "receipt.witness_rows": str(receipt.witnesses.row_count),
        "receipt.shows_rotation": str(receipt.witnesses.shows_rotation).lower(),
    }
    if receipt.max_abs_error is not None:
        facts["receipt.max_abs_error"] = f"{receipt.max_abs_error:.3g}"
    if receipt.canary is not None:
        facts["canary"] = "passed" if receipt.canary.passed else "failed"
    return facts


def _notes(capture: Capture, recorded: Ending, granted: Reservation | None) -> tuple[str, ...]:
    notes = []
    if recorded.error is not None and not recorded.of_the_messages():
        notes.append(
            f"{recorded.error.reason} came of the recorded reader's state at that moment (room, leases, "
            "probes, a writer that went away), which the file doesn't hold"
        )
    told = None if capture.reserved is None else capture.reserved.reservation
    if told is not None and told.held_prefix_tokens:
        notes.append(
            f"the first {told.held_prefix_tokens} tokens lay at the recorded reader already; the file "
            "doesn't hold them, and here they are blank"
        )
    for name in ("generation", "nonce", "held_prefix_tokens", "chunk_cap_bytes"):
        one, other = getattr(told, name, None), getattr(granted, name, None)
        if told is not None and granted is not None and one != other:
            notes.append(f"{name} was {_text(one)}; this reader granted {_text(other)}")
    return tuple(notes)


def _in_order(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    return (*one, *(name for name in other if name not in one))


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
