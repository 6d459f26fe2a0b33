"""Verdicts and refused tables in words that a person can act on."""

from __future__ import annotations

from kvpact.contract.contract import LayerGroup, RotaryTable
from kvpact.contract.describe import describe_layers
from kvpact.contract.tables import TableGap, table_at, table_gap
from kvpact.types import Difference, IdentityRelation, PlanStep, Verdict, VerdictWord

_NEAR_POSITIONS = (1, 128)
_DEEP = (
    "turning the keys again can't repair it, nor can raw keys, since deeper layers' keys come from states "
    "that were computed with the writer's table"
)
_HEADLINES = {
    VerdictWord.ACCEPT: "the decode side can use the prefill side's cache as it is",
    VerdictWord.CONVERT: "the decode side can use the prefill side's cache after a conversion on landing",
    VerdictWord.REJECT: "the decode side can't use the prefill side's cache",
}
_IDENTITIES = {
    IdentityRelation.EQUAL: "equal",
    IdentityRelation.DIFFERENT: "different",
    IdentityRelation.NOT_COMPARED: "not_compared (a digest is unknown; the rest holds if both run one model)",
}


def explain_tables(writer_group: LayerGroup, reader_group: LayerGroup, reach: int) -> str:
    """One sentence on what reading the writer's keys with the reader's table does over positions [0, reach).

    Groups whose table at `reach` isn't known as numbers give an empty text. A policy by served length takes
    `reach` as the length served.
    """
    tables = [
        table_at(group.rotary, length=reach, context_tokens=reach) for group in (writer_group, reader_group)
    ]
    writer, reader = tables
    return "" if writer is None or reader is None else explain_gap(writer, reader, reach=reach)


def explain_gap(writer: RotaryTable, reader: RotaryTable, *, reach: int) -> str:
    """The sentence of `explain_tables` for two tables: phase errors, 1 rad, the bound on one logit."""
    gap = table_gap(writer, reader, reach=reach)
    return "; ".join((_phases(gap), _past_one_rad(gap), _bound(gap), _DEEP))


def render_verdict(verdict: Verdict) -> str:
    """The whole verdict as plain lines for logs, errors and terminals; no trailing newline."""
    lines = [
        f"verdict: {verdict.word} - {_HEADLINES[verdict.word]}",
        f"identity: {_IDENTITIES[verdict.identity]}",
        f"exactness: {verdict.exactness}",
    ]
    count = len(verdict.differences)
    lines.append(f"differences: {count or 'none'}")
    for difference in verdict.differences:
        lines += _difference_lines(difference)
    if verdict.plan:
        lines.append(f"plan: {', '.join(_step_text(step) for step in verdict.plan)}")
    return "\n".join(lines)


def _difference_lines(difference: Difference) -> list[str]:
    where = f" ({describe_layers(difference.layers)})" if difference.layers else ""
    lines = [
        f"  {difference.field}{where}: {difference.relation}, {difference.action}",
        f"    prefill (writer): {difference.writer}",
        f"    decode (reader):  {difference.reader}",
    ]
    if difference.explanation:
        lines.append(f"    why: {difference.explanation}")
    lines.append(f"    do:  {difference.remedy}")
    return lines


def _step_text(step: PlanStep) -> str:
    bound = "" if step.bound_epsilons is None else f", within {step.bound_epsilons:g} epsilons"
    return f"{step.op} ({step.exactness}{bound})"


def _phases(gap: TableGap) -> str:
    positions = sorted({n for n in _NEAR_POSITIONS if n < gap.last_position} | {gap.last_position})
    errors = [f"{gap.phase_rad(n):.4g} rad at position {n}" for n in positions]
    listed = errors[0] if len(errors) == 1 else f"{', '.join(errors[:-1])} and {errors[-1]}"
    return f"the writer's keys are off by {listed} (lane pair {gap.lane})"


def _past_one_rad(gap: TableGap) -> str:
    first = gap.first_position_past_one_rad
    if first is None:
        return "no lane passes 1 rad"
    if first > gap.last_position:
        return f"no lane passes 1 rad before position {first}, beyond reach"
    return f"a lane passes 1 rad from position {first} on"


def _bound(gap: TableGap) -> str:
    return f"one attention logit moves by up to {gap.logit_factor:.4g} |q||k| times the softmax scale"
