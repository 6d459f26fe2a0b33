"""Verdicts from and to protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import DIGEST_BYTES, EnumCodec, join
from kvpact.types import (
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    IdentityRelation,
    PlanOp,
    PlanStep,
    Relation,
    Verdict,
    VerdictWord,
)
from kvpact.v1 import contract_pb2 as pb

VALUE_CHARACTERS = 256
MOST_DIFFERENCES = 256
WORDS = EnumCodec(pb.VerdictWord, "VERDICT_WORD", VerdictWord)
IDENTITIES = EnumCodec(pb.IdentityRelation, "IDENTITY_RELATION", IdentityRelation)
RELATIONS = EnumCodec(pb.Relation, "RELATION", Relation)
ACTIONS = EnumCodec(pb.DifferenceAction, "DIFFERENCE_ACTION", DifferenceAction)
EXACTNESSES = EnumCodec(pb.Exactness, "EXACTNESS", Exactness)


def encode_verdict(verdict: Verdict) -> pb.Verdict:
    """Verdict as a message; values for people are cut at 256 characters."""
    return pb.Verdict(
        word=WORDS.encode(verdict.word),
        identity=IDENTITIES.encode(verdict.identity),
        differences=[_encode_difference(difference) for difference in verdict.differences],
        plan=encode_plan(verdict.plan),
        exactness=EXACTNESSES.encode(verdict.exactness),
        writer_digest=verdict.writer_digest,
        reader_digest=verdict.reader_digest,
    )


def decode_verdict(message: pb.Verdict, path: str = "verdict") -> Verdict:
    """Verdict from a message.

    Raises:
        BadRequest: a field is unset or unknown; `param` is its path.
    """
    if len(message.differences) > MOST_DIFFERENCES:
        found = f"are {len(message.differences)}; at most {MOST_DIFFERENCES} are taken"
        raise fields.refusal(join(path, "differences"), found)
    return Verdict(
        word=WORDS.decode(message.word, join(path, "word")),
        identity=IDENTITIES.decode(message.identity, join(path, "identity")),
        differences=tuple(
            _decode_difference(difference, f"{path}.differences[{index}]")
            for index, difference in enumerate(message.differences)
        ),
        plan=decode_plan(message.plan, join(path, "plan")),
        exactness=EXACTNESSES.decode(message.exactness, join(path, "exactness")),
        writer_digest=decode_digest(message.writer_digest, join(path, "writer_digest")),
        reader_digest=decode_digest(message.reader_digest, join(path, "reader_digest")),
    )


def encode_plan(plan: Iterable[PlanStep]) -> list[pb.PlanStep]:
    """Steps as messages."""
    return [
        pb.PlanStep(
            op=step.op, exactness=EXACTNESSES.encode(step.exactness), bound_epsilons=step.bound_epsilons
        )
        for step in plan
    ]


def decode_plan(messages: Iterable[pb.PlanStep], path: str) -> tuple[PlanStep, ...]:
    """Steps from messages."""
    return tuple(_decode_step(message, f"{path}[{index}]") for index, message in enumerate(messages))


def decode_digest(value: bytes, path: str) -> ContractDigest:
    """Contract digest of 32 bytes."""
    return ContractDigest(fields.octets(value, path, length=DIGEST_BYTES))


def _encode_difference(difference: Difference) -> pb.Difference:
    return pb.Difference(
        field=difference.field,
        layers=difference.layers,
        writer=_cut(difference.writer),
        reader=_cut(difference.reader),
        relation=RELATIONS.encode(difference.relation),
        action=ACTIONS.encode(difference.action),
        remedy=difference.remedy,
        explanation=difference.explanation,
    )


def _decode_difference(message: pb.Difference, path: str) -> Difference:
    return Difference(
        field=fields.name(message.field, join(path, "field")),
        layers=tuple(message.layers),
        writer=fields.told(message.writer),
        reader=fields.told(message.reader),
        relation=RELATIONS.decode(message.relation, join(path, "relation")),
        action=ACTIONS.decode(message.action, join(path, "action")),
        remedy=fields.told(message.remedy),
        explanation=fields.told(message.explanation),
    )


def _decode_step(message: pb.PlanStep, path: str) -> PlanStep:
    try:
        op = PlanOp(message.op)
    except ValueError as error:
        known = ", ".join(PlanOp)
        found = fields.shown(message.op)
        raise fields.refusal(join(path, "op"), f"is {found}; expected one of {known}") from error
    return PlanStep(
        op=op,
        exactness=EXACTNESSES.decode(message.exactness, join(path, "exactness")),
        bound_epsilons=fields.optional_number(message, "bound_epsilons", path, positive=False),
    )


def _cut(value: str) -> str:
    return value if len(value) <= VALUE_CHARACTERS else value[: VALUE_CHARACTERS - 1] + "…"
