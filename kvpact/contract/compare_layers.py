"""Compares what two layers mean: attention, then rotation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvpact.contract.contract import LayerGroup, Layout, Rotary, RotaryTable
from kvpact.contract.describe import (
    describe_arrays,
    describe_formula,
    describe_latent,
    describe_numbers,
    describe_optional,
    describe_sections,
    describe_temperature,
)
from kvpact.contract.explain import explain_gap
from kvpact.contract.findings import Finding
from kvpact.contract.numbers import key_form
from kvpact.contract.plan import turn_between, turn_bound
from kvpact.contract.tables import PHASE_TOLERANCE_RAD, moves_within, table_at, table_gap
from kvpact.types import Basis, KeyState, Relation, RotationSite

AMPLITUDE_TOLERANCE = 1e-6
"""Relative difference of amplitudes that counts as none."""
_NATURAL_SITES = {
    (KeyState.ROTATED, RotationSite.WRITER, KeyState.RAW, RotationSite.READER),
    (KeyState.RAW, RotationSite.READER, KeyState.ROTATED, RotationSite.WRITER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSide:
    """One side's view of a layer."""

    group: LayerGroup
    layout: Layout
    context_tokens: int

    @property
    def rotary(self) -> Rotary:
        """Rotation of the layer's keys."""
        return self.group.rotary

    def table_at(self, reach: int) -> RotaryTable | None:
        """The table that runs for a request of `reach` tokens, if it is known as numbers."""
        return table_at(self.rotary, length=reach, context_tokens=self.context_tokens)


def compare_layer(writer: LayerSide, reader: LayerSide, *, reach: int) -> list[Finding]:
    """Every field on which the two views of one layer differ."""
    findings = _compare_attention(writer.group, reader.group)
    findings += _compare_key_state(writer, reader, reach)
    findings += _compare_text("basis", writer.rotary.basis, reader.rotary.basis)
    if KeyState.NONE not in (writer.rotary.key_state, reader.rotary.key_state):
        findings += _compare_rotary(writer.rotary, reader.rotary)
        findings += _compare_policy(writer, reader, reach)
        findings += _compare_tables(writer, reader, reach)
    return findings


def _compare_attention(writer: LayerGroup, reader: LayerGroup) -> list[Finding]:
    findings: list[Finding] = []
    findings += _compare_text("kind", writer.kind, reader.kind)
    findings += _compare_text("window", describe_optional(writer.window), describe_optional(reader.window))
    findings += _compare_text("kv_heads", str(writer.kv_heads), str(reader.kv_heads))
    findings += _compare_text("key_dim", str(writer.key_dim), str(reader.key_dim))
    findings += _compare_text("value_dim", str(writer.value_dim), str(reader.value_dim))
    findings += _compare_text("latent", describe_latent(writer.latent), describe_latent(reader.latent))
    findings += _compare_number("softmax_scale", writer.softmax_scale, reader.softmax_scale)
    findings += _compare_number("softcap", writer.softcap, reader.softcap)
    findings += _compare_text("sinks", _yes(writer.sinks), _yes(reader.sinks))
    if writer.temperature != reader.temperature:
        texts = describe_temperature(writer.temperature), describe_temperature(reader.temperature)
        findings.append(_incompatible("temperature", *texts))
    return findings


def _compare_key_state(writer: LayerSide, reader: LayerSide, reach: int) -> list[Finding]:
    ours, theirs = writer.rotary, reader.rotary
    findings: list[Finding] = []
    if ours.key_state is not theirs.key_state:
        obstacle = _obstacle_to_turning(writer, reader, reach)
        relation = Relation.INCOMPATIBLE if obstacle else Relation.CONVERTIBLE
        findings.append(
            Finding(
                field="key_state",
                writer=ours.key_state,
                reader=theirs.key_state,
                relation=relation,
                explanation=obstacle or _turning_text(writer, reader),
                lossy=not obstacle and turn_bound(key_form(writer.layout), key_form(reader.layout)) is None,
            )
        )
    if ours.site is not theirs.site:
        sites = (ours.key_state, ours.site, theirs.key_state, theirs.site)
        if KeyState.NONE not in sites and sites not in _NATURAL_SITES:
            findings.append(
                Finding(field="site", writer=ours.site, reader=theirs.site, relation=Relation.NOTED)
            )
    return findings


def _obstacle_to_turning(writer: LayerSide, reader: LayerSide, reach: int) -> str:
    if turn_between(writer.rotary, reader.rotary) is None:
        return "one side rotates the layer's keys, the other gives them no position at all"
    for side in (writer, reader):
        if side.rotary.basis is not Basis.IDENTITY:
            return f"keys in the {side.rotary.basis} basis can't be turned"
        if side.rotary.mrope_sections:
            return "keys with several position rows can't be turned"
        if side.table_at(reach) is None or moves_within(side.rotary, reach):
            return "no single table turned all keys of a request"
    return ""


def _turning_text(writer: LayerSide, reader: LayerSide) -> str:
    text = "read without a conversion, a key would be rotated twice or not at all"
    if turn_bound(key_form(writer.layout), key_form(reader.layout)) is None:
        text += "; turning keys that are stored in eight bits rounds each of them once more"
    return text


def _compare_rotary(writer: Rotary, reader: Rotary) -> list[Finding]:
    findings: list[Finding] = []
    findings += _compare_text("rotary_dim", str(writer.rotary_dim), str(reader.rotary_dim))
    findings += _compare_text("lane_offset", str(writer.lane_offset), str(reader.lane_offset))
    if writer.stored_lane_order is not reader.stored_lane_order:
        mixed = Basis.IDENTITY not in (writer.basis, reader.basis)
        findings.append(
            Finding(
                field="stored_lane_order",
                writer=writer.stored_lane_order,
                reader=reader.stored_lane_order,
                relation=Relation.INCOMPATIBLE if mixed else Relation.CONVERTIBLE,
                explanation="each stored lane is a mix of all of them, so none can be moved"
                if mixed
                else "read without a conversion, rotary lanes would pair with the wrong partners",
            )
        )
    findings += _compare_text("mrope_sections", describe_sections(writer), describe_sections(reader))
    return findings


def _compare_policy(writer: LayerSide, reader: LayerSide, reach: int) -> list[Finding]:
    ours, theirs = writer.rotary, reader.rotary
    tables_known = writer.table_at(reach) is not None and reader.table_at(reach) is not None
    same = ours.frequency_policy is theirs.frequency_policy
    if moves_within(ours, reach) or moves_within(theirs, reach):
        relation, why = Relation.INCOMPATIBLE, f"a request of {reach} tokens changes tables on its way"
    elif not tables_known and (ours.formula, ours.tables) != (theirs.formula, theirs.tables):
        relation, why = Relation.INCOMPATIBLE, f"the tables at {reach} tokens can't be compared as numbers"
    elif not same:
        relation, why = Relation.NOTED, f"the tables at {reach} tokens decide"
    else:
        return []
    texts = _policy_text(ours), _policy_text(theirs)
    return [
        Finding(
            field="frequency_policy", writer=texts[0], reader=texts[1], relation=relation, explanation=why
        )
    ]


def _compare_tables(writer: LayerSide, reader: LayerSide, reach: int) -> list[Finding]:
    ours, theirs = writer.table_at(reach), reader.table_at(reach)
    if ours is None or theirs is None:
        return []
    findings: list[Finding] = []
    if ours.inv_freq != theirs.inv_freq:
        findings.append(_table_finding(ours, theirs, reach))
    larger = max(abs(ours.amplitude), abs(theirs.amplitude))
    if not abs(ours.amplitude - theirs.amplitude) <= AMPLITUDE_TOLERANCE * larger:
        texts = describe_numbers(ours.amplitude, theirs.amplitude)
        why = "attention logits over the writer's keys would have another temperature"
        findings.append(_incompatible("amplitude", *texts, explanation=why))
    return findings


@functools.lru_cache(maxsize=64)
def _table_finding(writer: RotaryTable, reader: RotaryTable, reach: int) -> Finding:
    gap = table_gap(writer, reader, reach=reach)
    same_lanes = len(writer.inv_freq) == len(reader.inv_freq)
    rounding = same_lanes and gap.largest_phase_rad <= PHASE_TOLERANCE_RAD
    texts = describe_arrays(writer.inv_freq, reader.inv_freq)
    if not rounding:
        return _incompatible("inv_freq", *texts, explanation=explain_gap(writer, reader, reach=reach))
    why = (
        f"the writer's keys are off by at most {gap.largest_phase_rad:.4g} rad within {reach} positions, "
        f"no more than the {PHASE_TOLERANCE_RAD:g} rad that count as rounding"
    )
    return Finding(
        field="inv_freq", writer=texts[0], reader=texts[1], relation=Relation.ROUNDING, explanation=why
    )


def _compare_text(field: str, writer: str, reader: str) -> list[Finding]:
    return [] if writer == reader else [_incompatible(field, writer, reader)]


def _compare_number(field: str, writer: float | None, reader: float | None) -> list[Finding]:
    if writer == reader:
        return []
    if writer is None or reader is None:
        return [_incompatible(field, describe_optional(writer), describe_optional(reader))]
    return [_incompatible(field, *describe_numbers(writer, reader))]


def _incompatible(field: str, writer: str, reader: str, explanation: str = "") -> Finding:
    return Finding(
        field=field, writer=writer, reader=reader, relation=Relation.INCOMPATIBLE, explanation=explanation
    )


def _policy_text(rotary: Rotary) -> str:
    formula = "" if rotary.formula is None else f", {describe_formula(rotary.formula)}"
    switches = ", ".join(str(table.upper_length) for table in rotary.tables if table.upper_length is not None)
    return f"{rotary.frequency_policy}{f', switching at {switches} tokens' if switches else ''}{formula}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
