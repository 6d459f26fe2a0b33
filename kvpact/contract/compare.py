"""The verdict: compares a writer's contract with a reader's and says accept, convert or reject."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvpact.contract.compare_layers import LayerSide, compare_layer
from kvpact.contract.compare_layout import compare_layout
from kvpact.contract.compare_model import compare_identity, compare_model, compare_schema
from kvpact.contract.compare_shards import compare_shards
from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.describe import clip, describe_layers
from kvpact.contract.findings import REMEDIES, Finding
from kvpact.contract.identity import contract_digest
from kvpact.contract.plan import joint_plan, plan_steps, worst
from kvpact.errors import BadRequest
from kvpact.types import (
    Difference,
    DifferenceAction,
    Exactness,
    IdentityRelation,
    PlanStep,
    Relation,
    Verdict,
    VerdictWord,
)

CONVERTIBLE_FIELDS = (
    *("key_state", "stored_lane_order", "axis_order", "block_size", "packing", "byte_order", "shard"),
    *("key_dtype", "value_dtype", "key_quantization", "value_quantization"),
)
"""Fields whose difference a conversion on landing can bridge."""
LOSSY_FIELDS = ("key_state", "key_dtype", "value_dtype", "key_quantization", "value_quantization")
"""Fields whose conversion can lose precision beyond rounding."""
OnConvertible = Literal["convert", "reject"]
OnLossy = Literal["reject", "allow"]
_DOUBTFUL = (IdentityRelation.EQUAL, IdentityRelation.NOT_COMPARED, IdentityRelation.DIFFERENT)
_FIELD_ORDER = {field: index for index, field in enumerate(REMEDIES)}
_POLICY_EXPLANATION = "it could be converted, but the decode side's policy is to reject it"
_LOSSY_EXPLANATION = "a conversion loses precision, which the decode side's policy doesn't allow"
_Found = tuple[Finding, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a reader does about differences that can be bridged. Nothing here turns a check off."""

    on_convertible: OnConvertible = "convert"
    lossy: OnLossy = "reject"
    """Whether a plan may lose precision beyond rounding."""
    fields: tuple[tuple[str, OnConvertible], ...] = ()
    """Choices for single fields, over `on_convertible`."""
    lossy_fields: tuple[tuple[str, OnLossy], ...] = ()
    """Choices for single fields, over `lossy`."""

    def __post_init__(self) -> None:
        for chosen, known in ((self.fields, CONVERTIBLE_FIELDS), (self.lossy_fields, LOSSY_FIELDS)):
            for field, _ in chosen:
                if field not in known:
                    raise BadRequest(
                        f"policy for {field!r}: only {', '.join(known)} can be converted", param=field
                    )

    def for_field(self, field: str) -> OnConvertible:
        """The choice that holds for one field."""
        return dict(self.fields).get(field, self.on_convertible)

    def lossy_for(self, field: str) -> OnLossy:
        """Whether one field's conversion may lose precision."""
        return dict(self.lossy_fields).get(field, self.lossy)


def compare(writer: Contract, reader: Contract, policy: Policy, reach: int) -> Verdict:
    """Whether `reader` can use what `writer` wrote for requests of up to `reach` tokens; each difference.

    Pure and total: any pair of contracts gets a verdict. It is that of requests of `reach` tokens; where
    tables depend on length, a length at which other tables run and the pair is refused refuses the pair, and
    the verdict names that length. A formula has a table for each length: those behind its last table are
    tried at one more token and at each doubling.
    """
    verdict = compare_at(writer, reader, policy, reach)
    if verdict.word is VerdictWord.REJECT:
        return verdict
    for length in _other_lengths(writer, reader, reach):
        other = compare_at(writer, reader, policy, length)
        if other.word is VerdictWord.REJECT:
            return replace(other, differences=tuple(_at_length(part, length) for part in other.differences))
    return verdict


def compare_at(writer: Contract, reader: Contract, policy: Policy, table_length: int) -> Verdict:
    """Whether `reader` can use what `writer` wrote for requests of `table_length` tokens alone."""
    return compare_joint((writer,), reader, policy, table_length)


def compare_joint(writers: Sequence[Contract], reader: Contract, policy: Policy, reach: int) -> Verdict:
    """Whether `reader` can use what at least one writer wrote together: shards of one model, one cache.

    Tables are those of requests of `reach` tokens.

    A difference of any writer is a difference; shards are judged as a whole. `writer_digest` is that of the
    first writer.
    """
    found: list[_Found] = [(finding, ()) for finding in compare_shards(writers, reader)]
    for writer in writers:
        whole = compare_schema(writer, reader) + compare_model(writer.model, reader.model)
        found += [(finding, ()) for finding in whole + compare_layout(writer, reader)]
        found += _layer_findings(writer, reader, reach)
    differences = _differences(found, policy)
    word = _word({difference.action for difference in differences})
    plan: tuple[PlanStep, ...] = ()
    if word is VerdictWord.CONVERT:
        plan = joint_plan([plan_steps(writer, reader) for writer in writers])
    classes = [step.exactness for step in plan]
    classes += [Exactness.ROUNDING for difference in differences if _rounds(difference)]
    identities = [compare_identity(writer.model, reader.model) for writer in writers]
    return Verdict(
        word=word,
        identity=max(identities, key=_DOUBTFUL.index),
        differences=differences,
        plan=plan,
        exactness=worst(classes),
        writer_digest=contract_digest(writers[0]),
        reader_digest=contract_digest(reader),
    )


def _word(actions: set[DifferenceAction]) -> VerdictWord:
    if DifferenceAction.REJECT in actions:
        return VerdictWord.REJECT
    return VerdictWord.CONVERT if DifferenceAction.CONVERT in actions else VerdictWord.ACCEPT


def pairing_reach(writer: Contract, reader: Contract) -> int:
    """Longest request, in tokens, that both sides serve."""
    return min(writer.model.context_tokens, reader.model.context_tokens)


def _other_lengths(writer: Contract, reader: Contract, reach: int) -> list[int]:
    """Lengths below `reach`, ascending, at which a side may run other tables than at `reach`."""
    lengths: set[int] = set()
    for group in writer.layer_groups + reader.layer_groups:
        last = 1
        for table in group.rotary.tables:
            if table.upper_length is not None:
                last = table.upper_length
                lengths.add(last)
        if group.rotary.formula is not None:
            lengths.add(last + 1)
            while 0 < last < reach:
                lengths.add(last)
                last *= 2
    return sorted(length for length in lengths if 1 < length < reach)


def _at_length(part: Difference, length: int) -> Difference:
    if part.action is not DifferenceAction.REJECT:
        return part
    told = f"requests of {length} tokens are refused"
    return replace(part, explanation="; ".join(text for text in (told, part.explanation) if text))


def _layer_findings(writer: Contract, reader: Contract, reach: int) -> list[_Found]:
    ours, theirs = _groups_by_layer(writer), _groups_by_layer(reader)
    found: list[_Found] = []
    only_one = sorted(ours.keys() ^ theirs.keys())
    if only_one:
        texts = f"{len(ours)}: {describe_layers(ours)}", f"{len(theirs)}: {describe_layers(theirs)}"
        finding = Finding(field="layers", writer=texts[0], reader=texts[1], relation=Relation.INCOMPATIBLE)
        found.append((finding, tuple(only_one)))
    pairs: dict[tuple[int, int], tuple[LayerGroup, LayerGroup, list[int]]] = {}
    for layer in sorted(ours.keys() & theirs.keys()):
        left, right = ours[layer], theirs[layer]
        pairs.setdefault((id(left), id(right)), (left, right, []))[2].append(layer)
    for left, right, layers in pairs.values():
        findings = compare_layer(_side(writer, left), _side(reader, right), reach=reach)
        found += [(finding, tuple(layers)) for finding in findings]
    return found


def _side(contract: Contract, group: LayerGroup) -> LayerSide:
    return LayerSide(group=group, layout=contract.layout, context_tokens=contract.model.context_tokens)


def _groups_by_layer(contract: Contract) -> dict[int, LayerGroup]:
    return {layer: group for group in contract.layer_groups for layer in group.layers}


def _differences(found: Iterable[_Found], policy: Policy) -> tuple[Difference, ...]:
    """One difference per field and relation, whatever the number of layers it shows in."""
    merged: dict[tuple[str, Relation], dict[Finding, list[int]]] = {}
    for finding, layers in found:
        merged.setdefault((finding.field, finding.relation), {}).setdefault(finding, []).extend(layers)
    ordered = sorted(merged.items(), key=lambda item: (_FIELD_ORDER[item[0][0]], item[0][1]))
    return tuple(_difference(variants, policy) for _, variants in ordered)


def _difference(variants: dict[Finding, list[int]], policy: Policy) -> Difference:
    finding = max(variants, key=lambda variant: variant.lossy)
    action = _action(finding, policy)
    explanation = _joined(variants, "explanation")
    if action is DifferenceAction.REJECT and finding.relation is Relation.CONVERTIBLE:
        barred = policy.for_field(finding.field) == "reject"
        reason = _POLICY_EXPLANATION if barred else _LOSSY_EXPLANATION
        explanation = "; ".join(part for part in (explanation, reason) if part)
    return Difference(
        field=finding.field,
        layers=tuple(sorted({layer for layers in variants.values() for layer in layers})),
        writer=clip(_joined(variants, "writer")),
        reader=clip(_joined(variants, "reader")),
        relation=finding.relation,
        action=action,
        remedy=_remedy(finding, action, policy),
        explanation=explanation,
    )


def _action(finding: Finding, policy: Policy) -> DifferenceAction:
    match finding.relation:
        case Relation.INCOMPATIBLE:
            return DifferenceAction.REJECT
        case Relation.CONVERTIBLE if finding.lossy and policy.lossy_for(finding.field) == "reject":
            return DifferenceAction.REJECT
        case Relation.CONVERTIBLE:
            return DifferenceAction(policy.for_field(finding.field))
        case Relation.ROUNDING | Relation.NOTED:
            return DifferenceAction.ACCEPT


def _remedy(finding: Finding, action: DifferenceAction, policy: Policy) -> str:
    remedy = REMEDIES[finding.field]
    if finding.relation is Relation.CONVERTIBLE and action is DifferenceAction.REJECT:
        settings = {
            "handoff.on_convertible: convert": policy.for_field(finding.field) == "reject",
            "handoff.lossy: allow": finding.lossy and policy.lossy_for(finding.field) == "reject",
        }
        needed = " and ".join(setting for setting, missing in settings.items() if missing)
        return f"set {needed} on the decode side, or {remedy}"
    if finding.relation in (Relation.CONVERTIBLE, Relation.ROUNDING):
        return f"nothing to do; to have no difference, {remedy}"
    return remedy


def _joined(variants: dict[Finding, list[int]], part: str) -> str:
    """The text that all variants share, or each text with its layers."""
    layers_by_text: dict[str, list[int]] = {}
    for finding, layers in variants.items():
        layers_by_text.setdefault(getattr(finding, part), []).extend(layers)
    if len(layers_by_text) == 1:
        return next(iter(layers_by_text))
    return "; ".join(f"{describe_layers(layers)}: {text}" for text, layers in layers_by_text.items())


def _rounds(difference: Difference) -> bool:
    return difference.relation is Relation.ROUNDING or difference.field == "compute_dtype"
