"""Contracts and verdicts as JSON objects. A contract's object is its file, read back without defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpact.contract.canonical import contract_values
from kvpact.contract.contract import (
    AttentionTemperature,
    Contract,
    FrequencyFormula,
    LatentDims,
    LayerGroup,
    Layout,
    ModelIdentity,
    Quantization,
    Rotary,
    RotaryTable,
    Schema,
    Shard,
)
from kvpact.contract.identity import contract_digest
from kvpact.contract.json_fields import Fields
from kvpact.contract.validate import validate_contract
from kvpact.types import (
    AxisOrder,
    Basis,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    RotationSite,
    ScaleSource,
    Verdict,
)


def contract_to_json(contract: Contract) -> dict[str, Any]:
    """Every field of the contract, one entry per layer, with its digest in front."""
    return {"digest": contract_digest(contract).hex()} | contract_values(contract)


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict's word, its differences and its plan."""
    return {
        "verdict": verdict.word.value,
        "identity": verdict.identity.value,
        "differences": [
            {
                "field": difference.field,
                "layers": list(difference.layers),
                "writer": difference.writer,
                "reader": difference.reader,
                "relation": difference.relation.value,
                "action": difference.action.value,
                "remedy": difference.remedy,
                "explanation": difference.explanation,
            }
            for difference in verdict.differences
        ],
        "plan": [{"op": step.op.value, "exactness": step.exactness.value} for step in verdict.plan],
    }


def contract_from_json(values: Mapping[str, Any]) -> Contract:
    """The inverse of contract_to_json. The digest is derived again; layers with equal facts form one group.

    Raises:
        BadRequest: names the field that is unset, absent, unknown or out of range.
    """
    top = Fields("", values, optional=("digest",))
    schema, layers, layout = top.part("schema"), top.parts("layers"), top.part("layout")
    model = ModelIdentity(
        architecture=top.text("architecture"),
        function_digest=top.digest("function_digest"),
        lm_head_digest=top.digest("lm_head_digest"),
        tokenizer_digest=top.digest("tokenizer_digest"),
        compute_dtype=top.word("compute_dtype", Dtype),
        context_tokens=top.whole("context_tokens"),
        name=top.text("name"),
        revision=top.text("revision"),
        engine=top.text("engine"),
    )
    contract = Contract(
        schema=Schema(
            major=schema.whole("major"),
            minor=schema.whole("minor"),
            required_features=schema.texts("required_features"),
        ),
        model=model,
        layer_groups=_grouped([_layer(fields) for fields in layers]),
        layout=_layout(layout),
    )
    schema.close()
    top.close()
    validate_contract(contract)
    return contract


def _grouped(layers: list[LayerGroup]) -> tuple[LayerGroup, ...]:
    members: dict[LayerGroup, list[int]] = {}
    for group in layers:
        members.setdefault(replace(group, layers=()), []).extend(group.layers)
    groups = (replace(facts, layers=tuple(sorted(own))) for facts, own in members.items())
    return tuple(sorted(groups, key=lambda group: group.layers))


def _layer(fields: Fields) -> LayerGroup:
    rotary = fields.part("rotary", optional=("tables",))
    group = LayerGroup(
        layers=(fields.whole("layer"),),
        kind=fields.word("kind", LayerKind),
        window=fields.optional_whole("window"),
        kv_heads=fields.whole("kv_heads"),
        key_dim=fields.whole("key_dim"),
        value_dim=fields.whole("value_dim"),
        softmax_scale=fields.number("softmax_scale"),
        softcap=fields.optional_number("softcap"),
        sinks=fields.flag("sinks"),
        temperature=_temperature(fields.optional_part("temperature")),
        latent=_latent(fields.optional_part("latent")),
        rotary=_rotary(rotary),
    )
    fields.close()
    return group


def _temperature(fields: Fields | None) -> AttentionTemperature | None:
    if fields is None:
        return None
    temperature = AttentionTemperature(
        formula=fields.text("formula"), parameters=fields.numbers("parameters")
    )
    fields.close()
    return temperature


def _latent(fields: Fields | None) -> LatentDims | None:
    if fields is None:
        return None
    latent = LatentDims(
        latent_dim=fields.whole("latent_dim"),
        rope_dim=fields.whole("rope_dim"),
        content_first=fields.flag("content_first"),
    )
    fields.close()
    return latent


def _rotary(fields: Fields) -> Rotary:
    formula = _formula(fields.optional_part("formula"))
    key_state = fields.word("key_state", KeyState)
    rotary = Rotary(
        key_state=key_state,
        site=fields.word("site", RotationSite),
        rotary_dim=fields.whole("rotary_dim"),
        lane_offset=fields.whole("lane_offset"),
        stored_lane_order=fields.word("stored_lane_order", LaneOrder),
        frequency_policy=fields.word("frequency_policy", FrequencyPolicy),
        tables=_tables(fields, has_table=key_state is not KeyState.NONE and formula is None),
        formula=formula,
        mrope_sections=fields.wholes("mrope_sections"),
        mrope_interleaved=fields.flag("mrope_interleaved"),
        basis=fields.word("basis", Basis),
    )
    fields.close()
    return rotary


def _tables(fields: Fields, *, has_table: bool) -> tuple[RotaryTable, ...]:
    inv_freq = fields.float32s("inv_freq")
    amplitude = fields.number("amplitude") if inv_freq or has_table else fields.optional_number("amplitude")
    shortest = () if amplitude is None else (RotaryTable(inv_freq=inv_freq, amplitude=amplitude),)
    if not fields.has("tables"):
        return shortest
    tables = tuple(_table(part) for part in fields.parts("tables"))
    if not tables or not shortest or replace(tables[0], upper_length=None) != shortest[0]:
        raise fields.wrong("tables", "other numbers", "a first table equal to inv_freq and amplitude")
    return tables


def _table(fields: Fields) -> RotaryTable:
    table = RotaryTable(
        inv_freq=fields.float32s("inv_freq"),
        amplitude=fields.number("amplitude"),
        upper_length=fields.optional_whole("upper_length"),
    )
    fields.close()
    return table


def _formula(fields: Fields | None) -> FrequencyFormula | None:
    if fields is None:
        return None
    formula = FrequencyFormula(name=fields.text("name"), parameters=fields.numbers("parameters"))
    fields.close()
    return formula


def _layout(fields: Fields) -> Layout:
    shard = fields.part("shard")
    layout = Layout(
        axis_order=fields.word("axis_order", AxisOrder),
        block_size=fields.whole("block_size"),
        packing=fields.word("packing", Packing),
        key_dtype=fields.word("key_dtype", Dtype),
        value_dtype=fields.word("value_dtype", Dtype),
        byte_order=fields.word("byte_order", ByteOrder),
        key_quantization=_quantization(fields.part("key_quantization")),
        value_quantization=_quantization(fields.part("value_quantization")),
        shard=Shard(
            tensor_parallel_rank=shard.whole("tensor_parallel_rank"),
            tensor_parallel_size=shard.whole("tensor_parallel_size"),
            head_start=shard.whole("head_start"),
            head_end=shard.whole("head_end"),
            layer_start=shard.whole("layer_start"),
            layer_end=shard.whole("layer_end"),
        ),
    )
    shard.close()
    fields.close()
    return layout


def _quantization(fields: Fields) -> Quantization:
    quantization = Quantization(
        scheme=fields.word("scheme", QuantizationScheme),
        granularity=fields.optional_word("granularity", QuantizationGranularity),
        scale_source=fields.optional_word("scale_source", ScaleSource),
        fixed_scales=fields.float32s("fixed_scales"),
    )
    fields.close()
    return quantization
