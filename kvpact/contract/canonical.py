"""A contract as plain values, one entry per layer: the form that is digested and written as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvpact.contract.contract import Contract, LayerGroup, Layout, Quantization, Rotary

PEOPLE_ONLY = ("name", "revision", "engine")


def contract_values(contract: Contract) -> dict[str, Any]:
    """Every field: digests in hexadecimal or None, enums as their words, layers ascending."""
    model = contract.model
    layers = [(layer, group) for group in contract.layer_groups for layer in group.layers]
    return {
        "schema": {
            "major": contract.schema.major,
            "minor": contract.schema.minor,
            "required_features": list(contract.schema.required_features),
        },
        "architecture": model.architecture,
        "function_digest": _hex(model.function_digest),
        "lm_head_digest": _hex(model.lm_head_digest),
        "tokenizer_digest": _hex(model.tokenizer_digest),
        "compute_dtype": model.compute_dtype.value,
        "context_tokens": model.context_tokens,
        "name": model.name,
        "revision": model.revision,
        "engine": model.engine,
        "layers": [_layer_values(layer, group) for layer, group in sorted(layers, key=lambda pair: pair[0])],
        "layout": _layout_values(contract.layout),
    }


def canonical_text(contract: Contract) -> str:
    """The canonical JSON of what counts: keys sorted, no spaces, the names for people left out.

    The same as json.dumps of `contract_values`, put together from parts so that a rotary object that many
    layers share is written once. A quotation mark in a text is escaped, so no text looks like a part's key.

    Raises:
        ValueError: a number is not finite.
    """
    values = contract_values(replace(contract, layer_groups=()))
    outer = _text({key: value for key, value in values.items() if key not in PEOPLE_ONLY})
    before, after = outer.split('"layers":[]')
    texts: dict[int, str] = {}
    rotaries = {id(group.rotary): group.rotary for group in contract.layer_groups}
    written = {key: _text(_rotary_values(rotary)) for key, rotary in rotaries.items()}
    for group in contract.layer_groups:
        bare = _text(_layer_values(0, group) | {"rotary": None})
        head, tail = bare.split('"layer":0,"rotary":null')
        rotary = written[id(group.rotary)]
        texts |= {layer: f'{head}"layer":{layer},"rotary":{rotary}{tail}' for layer in group.layers}
    return f'{before}"layers":[{",".join(texts[layer] for layer in sorted(texts))}]{after}'


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


def _layer_values(layer: int, group: LayerGroup) -> dict[str, Any]:
    temperature, latent = group.temperature, group.latent
    return {
        "layer": layer,
        "kind": group.kind.value,
        "window": group.window,
        "kv_heads": group.kv_heads,
        "key_dim": group.key_dim,
        "value_dim": group.value_dim,
        "softmax_scale": group.softmax_scale,
        "softcap": group.softcap,
        "sinks": group.sinks,
        "temperature": temperature
        and {"formula": temperature.formula, "parameters": list(temperature.parameters)},
        "latent": latent
        and {
            "latent_dim": latent.latent_dim,
            "rope_dim": latent.rope_dim,
            "content_first": latent.content_first,
        },
        "rotary": _rotary_values(group.rotary),
    }


def _rotary_values(rotary: Rotary) -> dict[str, Any]:
    shortest = rotary.tables[0] if rotary.tables else None
    formula = rotary.formula
    values: dict[str, Any] = {
        "key_state": rotary.key_state.value,
        "site": rotary.site.value,
        "rotary_dim": rotary.rotary_dim,
        "lane_offset": rotary.lane_offset,
        "stored_lane_order": rotary.stored_lane_order.value,
        "frequency_policy": rotary.frequency_policy.value,
        "inv_freq": list(shortest.inv_freq) if shortest else [],
        "amplitude": shortest.amplitude if shortest else None,
        "formula": formula and {"name": formula.name, "parameters": list(formula.parameters)},
        "mrope_sections": list(rotary.mrope_sections),
        "mrope_interleaved": rotary.mrope_interleaved,
        "basis": rotary.basis.value,
    }
    if len(rotary.tables) > 1 or (shortest and shortest.upper_length is not None):
        values["tables"] = [
            {
                "inv_freq": list(table.inv_freq),
                "amplitude": table.amplitude,
                "upper_length": table.upper_length,
            }
            for table in rotary.tables
        ]
    return values


def _layout_values(layout: Layout) -> dict[str, Any]:
    shard = layout.shard
    return {
        "axis_order": layout.axis_order.value,
        "block_size": layout.block_size,
        "packing": layout.packing.value,
        "key_dtype": layout.key_dtype.value,
        "value_dtype": layout.value_dtype.value,
        "byte_order": layout.byte_order.value,
        "key_quantization": _quantization_values(layout.key_quantization),
        "value_quantization": _quantization_values(layout.value_quantization),
        "shard": {
            "tensor_parallel_rank": shard.tensor_parallel_rank,
            "tensor_parallel_size": shard.tensor_parallel_size,
            "head_start": shard.head_start,
            "head_end": shard.head_end,
            "layer_start": shard.layer_start,
            "layer_end": shard.layer_end,
        },
    }


def _quantization_values(quantization: Quantization) -> dict[str, Any]:
    granularity, source = quantization.granularity, quantization.scale_source
    return {
        "scheme": quantization.scheme.value,
        "granularity": None if granularity is None else granularity.value,
        "scale_source": None if source is None else source.value,
        "fixed_scales": list(quantization.fixed_scales),
    }
