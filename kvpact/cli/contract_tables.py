"""Contracts and verdicts as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kvpact.cli.output import console
from kvpact.contract.contract import Contract, LayerGroup, Quantization
from kvpact.contract.identity import contract_digest
from kvpact.types import Difference, IdentityRelation, KeyState, PlanStep, Verdict, VerdictWord

WORD_STYLES = {
    VerdictWord.ACCEPT: "bold green",
    VerdictWord.CONVERT: "bold yellow",
    VerdictWord.REJECT: "bold red",
}
SHOWN_FREQUENCIES = 3
CONDITION = "holds only if both sides are one model: identity wasn't compared"


def print_contract(contract: Contract) -> None:
    """Model, layer groups and layout, with the digest of the whole."""
    model, layout, shard = contract.model, contract.layout, contract.layout.shard
    _print_facts(
        [
            ("digest", contract_digest(contract).hex()),
            ("architecture", model.architecture),
            ("function digest", _digest(model.function_digest)),
            ("lm_head digest", _digest(model.lm_head_digest)),
            ("tokenizer digest", _digest(model.tokenizer_digest)),
            ("compute dtype", model.compute_dtype.value),
            ("context", f"{model.context_tokens} tokens"),
            ("layout", f"{layout.axis_order.value}, blocks of {layout.block_size} tokens"),
            ("keys, values", f"{layout.key_dtype.value}, {layout.value_dtype.value}, {layout.packing.value}"),
            ("byte order", layout.byte_order.value),
            ("quantization", f"{_scheme(layout.key_quantization)}, {_scheme(layout.value_quantization)}"),
            ("heads held", f"[{shard.head_start}, {shard.head_end})"),
            ("layers held", f"[{shard.layer_start}, {shard.layer_end})"),
        ]
    )
    for group in contract.layer_groups:
        console.print(f"\nlayers {layer_ranges(group.layers)}", style="bold", highlight=False)
        _print_facts(_group_facts(group))


def print_verdict(verdict: Verdict) -> None:
    """The word first, then every difference with what to do about it, then the plan."""
    word = Text(verdict.word.value, style=WORD_STYLES[verdict.word])
    console.print(word.append(f"  identity: {verdict.identity.value}", style="default"))
    if verdict.differences:
        table = Table(box=box.SIMPLE)
        for heading in ("field", "layers", "prefill (writer)", "decode (reader)", "action"):
            table.add_column(heading, overflow="fold")
        for difference in verdict.differences:
            table.add_row(*_difference_cells(difference))
        console.print(table, highlight=False)
    for difference in verdict.differences:
        for label, text in (("why", difference.explanation), ("remedy", difference.remedy)):
            if text:
                console.print(
                    f"{difference.field}: {label}: {text}", highlight=False, markup=False, soft_wrap=True
                )
    if verdict.plan:
        condition = f" ({CONDITION})" if verdict.identity is IdentityRelation.NOT_COMPARED else ""
        steps = ", ".join(_step(step) for step in verdict.plan)
        console.print(f"plan: {steps}{condition}", highlight=False, markup=False, soft_wrap=True)


def layer_ranges(layers: Sequence[int]) -> str:
    """Ascending layer indices as ranges, such as 0-3, 5; "all" for none."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "all"


def _print_facts(facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        line = Text(f"{name:<18}", style="bold").append(value, style="default")
        console.print(line, highlight=False, soft_wrap=True)


def _group_facts(group: LayerGroup) -> Iterable[tuple[str, str]]:
    rotary = group.rotary
    yield "kind", group.kind.value if group.window is None else f"{group.kind.value}, window {group.window}"
    yield "KV heads", f"{group.kv_heads} of {group.key_dim} key and {group.value_dim} value lanes"
    yield "softmax scale", f"{group.softmax_scale:.9g}"
    if group.softcap is not None:
        yield "softcap", f"{group.softcap:.9g}"
    if group.sinks:
        yield "sinks", "one a query head"
    if group.temperature is not None:
        yield "temperature", f"{group.temperature.formula} of {_numbers(group.temperature.parameters)}"
    if group.latent is not None:
        parts = [f"{group.latent.latent_dim} latent", f"{group.latent.rope_dim} rotary"]
        yield "latent row", " then ".join(parts if group.latent.content_first else reversed(parts)) + " lanes"
    yield "stored keys", rotary.key_state.value
    if rotary.key_state is KeyState.NONE:
        return
    end = rotary.lane_offset + rotary.rotary_dim
    yield (
        "rotary lanes",
        f"[{rotary.lane_offset}, {end}), {rotary.stored_lane_order.value}, by {rotary.site.value}",
    )
    yield "frequencies", rotary.frequency_policy.value
    for table in rotary.tables:
        bound = "" if table.upper_length is None else f", up to {table.upper_length} tokens"
        yield "inv_freq", f"{_frequencies(table.inv_freq)}{bound}"
        yield "amplitude", f"{table.amplitude:.9g}{bound}"
    if rotary.formula is not None:
        yield "beyond that", f"{rotary.formula.name} of {_numbers(rotary.formula.parameters)}"
    if rotary.mrope_sections:
        how = "interleaved" if rotary.mrope_interleaved else "in runs"
        yield "M-RoPE sections", f"{', '.join(str(lanes) for lanes in rotary.mrope_sections)}, {how}"


def _frequencies(inv_freq: tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:.9g}" for value in inv_freq[:SHOWN_FREQUENCIES])
    rest = f", ... {inv_freq[-1]:.9g} ({len(inv_freq)} numbers)" if len(inv_freq) > SHOWN_FREQUENCIES else ""
    return shown + rest


def _numbers(parameters: Iterable[float]) -> str:
    return ", ".join(f"{value:.9g}" for value in parameters)


def _difference_cells(difference: Difference) -> tuple[Text, ...]:
    values = (difference.writer, difference.reader, difference.action.value)
    return tuple(Text(cell) for cell in (difference.field, layer_ranges(difference.layers), *values))


def _digest(digest: bytes | None) -> str:
    return "unknown" if digest is None else digest.hex()


def _scheme(quantization: Quantization) -> str:
    return quantization.scheme.value


def _step(step: PlanStep) -> str:
    bound = "" if step.bound_epsilons is None else f", {step.bound_epsilons:g} eps"
    return f"{step.op.value} ({step.exactness.value}{bound})"
