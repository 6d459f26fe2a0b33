"""The verdict: compares a writer's contract with a reader's and says accept, convert or reject."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvpact.contract.compare_layers import LayerSide, compare_layer
from kvpact.contract.compare_layout import compare_layout
from kvpact.contract.compare_model import compare_identity, compare_model, compare_schema
from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.describe import clip, describe_layers
from kvpact.contract.findings import REMEDIES, Finding
from kvpact.contract.identity import contract_digest
from kvpact.contract.plan import plan_steps, worst
from kvpact.errors import BadRequest
from kvpact.types import Difference, DifferenceAction, Exactness, Relation, Verdict, VerdictWord

CONVERTIBLE_FIELDS = ("key_state", "axis_order", "block_size")
"""Fields whose difference a conversion on landing can bridge."""
OnConvertible = Literal["convert", "reject"]
_FIELD_ORDER = {field: index for index, field in enumerate(REMEDIES)}
_POLICY_EXPLANATION = "it could be converted, but the decode side's policy is to reject it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a reader does about differences that can be bridged. Nothing here turns a check off."""

    on_convertible: OnConvertible = "convert"
    lossy: Literal["reject", "allow"] = "reject"
    """Whether a plan may lose precision beyond rounding."""
    fields: tuple[tuple[str, OnConvertible], ...] = ()
    """Choices for single fields, over `on_convertible`."""

    def __post_init__(self) -> None:
        for field, _ in self.fields:
            if field not in CONVERTIBLE_FIELDS:
                known = ", ".join(CONVERTIBLE_FIELDS)
                raise BadRequest(f"policy for {field!r}: only {known} can be converted", param=field)

    def for_field(self, field: str) -> OnConvertible:
        """The choice that holds for one field."""
        return dict(self.fields).get(field, self.on_convertible)


def compare(writer: Contract, reader: Contract, policy: Policy, reach: int) -> Verdict:
    """Whether `reader` can use what `writer` wrote for requests of up to `reach` tokens; every difference.

    Pure and total: any pair of contracts gets a verdict. At pairing `reach` is `pairing_reach`, at Reserve
    the request's table_length.
    """
    whole = compare_schema(writer, reader) + compare_model(writer.model, reader.model)
    whole += compare_layout(writer, reader)
    found: list[tuple[Finding, tuple[int, ...]]] = [(finding, ()) for finding in whole]
    found += _layer_findings(writer, reader, reach)
    differences = _differences(found, policy)
    actions = {difference.action for difference in differences}
    word = VerdictWord.ACCEPT
    if DifferenceAction.REJECT in actions:
        word = VerdictWord.REJECT
    elif DifferenceAction.CONVERT in actions:
        word = VerdictWord.CONVERT
    plan = plan_steps(writer, reader) if word is VerdictWord.CONVERT else ()
    classes = [step.exactness for step in plan]
    classes += [Exactness.ROUNDING for difference in differences if _rounds(difference)]
    return Verdict(
        word=word,
        identity=compare_identity(writer.model, reader.model),
        differences=differences,
        plan=plan,
        exactness=worst(classes),
        writer_digest=contract_digest(writer),
        reader_digest=contract_digest(reader),
    )


def pairing_reach(writer: Contract, reader: Contract) -> int:
    """Longest request, in tokens, that both sides serve."""
    return min(writer.model.context_tokens, reader.model.context_tokens)


def _layer_findings(writer: Contract, reader: Contract, reach: int) -> list[tuple[Finding, tuple[int, ...]]]:
    ours, theirs = _groups_by_layer(writer), _groups_by_layer(reader)
    found: list[tuple[Finding, tuple[int, ...]]] = []
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


def _differences(found: Iterable[tuple[Finding, tuple[int, ...]]], policy: Policy) -> tuple[Difference, ...]:
    """One difference per field and relation, whatever the number of layers it shows in."""
    merged: dict[tuple[str, Relation], dict[Finding, list[int]]] = {}
    for finding, layers in found:
        merged.setdefault((finding.field, finding.relation), {}).setdefault(finding, []).extend(layers)
    ordered = sorted(merged.items(), key=lambda item: (_FIELD_ORDER[item[0][0]], item[0][1]))
    return tuple(_difference(variants, policy) for _, variants in ordered)


def _difference(variants: dict[Finding, list[int]], policy: Policy) -> Difference:
    finding = next(iter(variants))
    action = _action(finding, policy)
    explanation = _joined(variants, "explanation")
    if action is DifferenceAction.REJECT and finding.relation is Relation.CONVERTIBLE:
        explanation = "; ".join(part for part in (explanation, _POLICY_EXPLANATION) if part)
    return Difference(
        field=finding.field,
        layers=tuple(sorted(layer for layers in variants.values() for layer in layers)),
        writer=clip(_joined(variants, "writer")),
        reader=clip(_joined(variants, "reader")),
        relation=finding.relation,
        action=action,
        remedy=_remedy(finding, action),
        explanation=explanation,
    )


def _action(finding: Finding, policy: Policy) -> DifferenceAction:
    match finding.relation:
        case Relation.INCOMPATIBLE:
            return DifferenceAction.REJECT
        case Relation.CONVERTIBLE:
            return DifferenceAction(policy.for_field(finding.field))
        case Relation.ROUNDING | Relation.NOTED:
            return DifferenceAction.ACCEPT


def _remedy(finding: Finding, action: DifferenceAction) -> str:
    remedy = REMEDIES[finding.field]
    if finding.relation is Relation.CONVERTIBLE and action is DifferenceAction.REJECT:
        return f"set handoff.on_convertible: convert on the decode side, or {remedy}"
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
