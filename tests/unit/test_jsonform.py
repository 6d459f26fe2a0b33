"""Contracts as JSON: complete, exact, and refused by field name when they aren't whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies

from kvpact.contract.contract import (
    AttentionTemperature,
    Contract,
    FrequencyFormula,
    LatentDims,
    Quantization,
    RotaryTable,
)
from kvpact.contract.jsonform import contract_from_json, contract_to_json, verdict_to_json
from kvpact.errors import BadRequest
from kvpact.types import (
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    FrequencyPolicy,
    IdentityRelation,
    KeyState,
    LayerKind,
    PlanOp,
    PlanStep,
    QuantizationGranularity,
    QuantizationScheme,
    Relation,
    ScaleSource,
    Verdict,
    VerdictWord,
)
from tests.factories import (
    make_contract,
    make_group,
    make_inv_freq,
    make_rotary,
    with_group,
    with_layout,
    with_rotary,
)

TABLE = RotaryTable(inv_freq=make_inv_freq(), amplitude=1.0)


def _there_and_back(contract: Contract) -> Contract:
    return contract_from_json(json.loads(json.dumps(contract_to_json(contract))))


def _full_and_sliding() -> Contract:
    full = make_group(layers=(0, 2))
    sliding = make_group(layers=(1, 3), kind=LayerKind.SLIDING, window=8, rotary=make_rotary(theta=1e6))
    return make_contract(layer_groups=(full, sliding))


@pytest.mark.parametrize(
    "contract",
    [
        make_contract(),
        make_contract(function_digest=None, name="tiny", key_state=KeyState.RAW),
        make_contract(key_state=KeyState.NONE),
        _full_and_sliding(),
        with_group(make_contract(), softcap=30.0, sinks=True),
        with_group(
            make_contract(), temperature=AttentionTemperature(formula="log1p", parameters=(0.1, 8192.0))
        ),
        with_group(
            make_contract(),
            kind=LayerKind.MLA_LATENT,
            latent=LatentDims(latent_dim=8, rope_dim=4, content_first=True),
        ),
        with_rotary(
            make_contract(),
            tables=(replace(TABLE, upper_length=32), replace(TABLE, amplitude=1.19)),
            frequency_policy=FrequencyPolicy.BY_REQUEST_LENGTH,
        ),
        with_rotary(make_contract(), tables=(replace(TABLE, upper_length=32),)),
        with_rotary(make_contract(), tables=(), formula=FrequencyFormula(name="ntk", parameters=(2.0, 32.0))),
        with_rotary(make_contract(), mrope_sections=(2, 3, 3), mrope_interleaved=True),
        with_layout(
            make_contract(),
            key_quantization=Quantization(
                scheme=QuantizationScheme.SYMMETRIC,
                granularity=QuantizationGranularity.HEAD,
                scale_source=ScaleSource.FIXED,
                fixed_scales=(0.5, 0.25, 0.125, 0.0625),
            ),
        ),
    ],
)
def test_a_contract_comes_back_from_its_json(contract: Contract) -> None:
    assert _there_and_back(contract) == contract


@given(
    strategies.lists(
        strategies.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8
    )
)
def test_every_bit_of_a_frequency_survives_the_json(numbers: list[float]) -> None:
    contract = make_contract(inv_freq=tuple(numbers))
    back = _there_and_back(contract).layer_groups[0].rotary.tables[0].inv_freq
    assert np.array(back, np.float32).tobytes() == np.array(numbers, np.float32).tobytes()


def test_layers_are_listed_one_by_one_and_grouped_again_when_read() -> None:
    contract = _full_and_sliding()
    values = contract_to_json(contract)
    assert [layer["layer"] for layer in values["layers"]] == [0, 1, 2, 3]
    assert [layer["window"] for layer in values["layers"]] == [None, 8, None, 8]
    split = make_contract(layer_groups=(make_group(layers=(1,)), make_group(layers=(0,))))
    assert _there_and_back(split) == make_contract(layer_groups=(make_group(layers=(0, 1)),))


def test_the_json_has_the_promised_fields() -> None:
    values = contract_to_json(make_contract())
    assert values["digest"] == values["digest"].lower()
    assert len(values["digest"]) == 64
    top = {"digest", "function_digest", "lm_head_digest", "tokenizer_digest", "compute_dtype", "architecture"}
    assert top | {"context_tokens", "schema", "layers", "layout"} <= set(values)
    layer = {"layer", "kind", "window", "kv_heads", "key_dim", "value_dim", "softmax_scale", "rotary"}
    assert layer <= set(values["layers"][0])
    rotary = values["layers"][0]["rotary"]
    assert {"key_state", "rotary_dim", "stored_lane_order", "inv_freq", "amplitude"} <= set(rotary)
    assert "tables" not in rotary


def test_several_tables_are_given_beside_the_shortest() -> None:
    tables = (replace(TABLE, upper_length=32), replace(TABLE, inv_freq=make_inv_freq(theta=1e6)))
    rotary = contract_to_json(with_rotary(make_contract(), tables=tables))["layers"][0]["rotary"]
    assert len(rotary["tables"]) == 2
    assert (rotary["inv_freq"], rotary["amplitude"]) == (list(make_inv_freq()), 1.0)


def _paths(values: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(values, dict):
        below = [path for key, value in values.items() for path in _paths(value, (*prefix, key))]
        return [(*prefix, key) for key in values] + below
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return _paths(values[0], (*prefix, 0))
    return []


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


ALL_PATHS = [path for path in _paths(contract_to_json(make_contract())) if path != ("digest",)]


@pytest.mark.parametrize("path", ALL_PATHS, ids=lambda path: ".".join(str(key) for key in path))
def test_an_absent_field_is_refused_by_its_name(path: tuple[Any, ...]) -> None:
    values = copy.deepcopy(contract_to_json(make_contract()))
    del _at(values, path[:-1])[path[-1]]
    with pytest.raises(BadRequest, match=rf"{path[-1]} is absent") as refusal:
        contract_from_json(values)
    assert refusal.value.param is not None
    assert refusal.value.param.endswith(str(path[-1]))


@pytest.mark.parametrize(
    "path", [(), ("schema",), ("layers", 0), ("layers", 0, "rotary"), ("layout",), ("layout", "shard")]
)
def test_an_unknown_field_is_refused_by_its_name(path: tuple[Any, ...]) -> None:
    values = copy.deepcopy(contract_to_json(make_contract()))
    _at(values, path)["surprise"] = 1
    with pytest.raises(BadRequest, match="surprise is unknown"):
        contract_from_json(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v["layers"][0]["rotary"].update(key_state="unspecified"),
            "key_state: found 'unspecified'",
        ),
        (lambda v: v["layers"][0]["rotary"].update(key_state=None), "key_state: found None"),
        (lambda v: v["layers"][1].update(kind=""), r"layers\[1\].kind"),
        (lambda v: v["layers"][1].update(layer=0), "layers"),
        (lambda v: v["layers"][1].update(softmax_scale=None), "softmax_scale"),
        (lambda v: v["layers"][0].update(kv_heads="2"), "kv_heads"),
        (lambda v: v["layers"][0].update(sinks=0), "sinks"),
        (lambda v: v["layers"][0]["rotary"]["inv_freq"].pop(), "inv_freq: found '7 numbers'"),
        (lambda v: v["layers"][0]["rotary"]["inv_freq"].__setitem__(0, float("nan")), "inv_freq"),
        (lambda v: v["layers"][0]["rotary"]["inv_freq"].__setitem__(0, 1e300), "inv_freq"),
        (lambda v: v["layers"][0]["rotary"].update(amplitude=None), "amplitude"),
        (lambda v: v["layers"][0]["rotary"].update(amplitude=0), "amplitude"),
        (lambda v: v["layers"][0]["rotary"].update(tables=[]), "tables"),
        (lambda v: v["layout"].update(axis_order="nhd"), "axis_order: found 'nhd', expected NHD or HND"),
        (lambda v: v["layout"].update(key_dtype="bf16"), "key_dtype"),
        (lambda v: v["layout"].update(block_size=0), "block_size"),
        (lambda v: v.update(function_digest="abc"), "function_digest"),
        (lambda v: v.update(schema=None), "schema"),
        (lambda v: v.update(layers={}), "layers"),
        (lambda v: v["schema"].update(required_features=[1]), "required_features"),
    ],
)
def test_an_unset_or_wrong_field_is_refused_by_its_name(change: Callable[[Any], Any], message: str) -> None:
    values = copy.deepcopy(contract_to_json(make_contract()))
    change(values)
    with pytest.raises(BadRequest, match=message):
        contract_from_json(values)


def test_a_verdict_is_written_in_words() -> None:
    difference = Difference(
        field="inv_freq",
        layers=(0, 1),
        writer="a",
        reader="b",
        relation=Relation.INCOMPATIBLE,
        action=DifferenceAction.REJECT,
        remedy="equal tables",
        explanation="phases differ",
    )
    verdict = Verdict(
        word=VerdictWord.REJECT,
        identity=IdentityRelation.EQUAL,
        differences=(difference,),
        plan=(PlanStep(op=PlanOp.ROTATE, exactness=Exactness.ROUNDING, bound_epsilons=4.0),),
        exactness=Exactness.ROUNDING,
        writer_digest=ContractDigest(b"w" * 32),
        reader_digest=ContractDigest(b"r" * 32),
    )
    assert verdict_to_json(verdict) == {
        "verdict": "reject",
        "identity": "equal",
        "differences": [
            {
                "field": "inv_freq",
                "layers": [0, 1],
                "writer": "a",
                "reader": "b",
                "relation": "incompatible",
                "action": "reject",
                "remedy": "equal tables",
                "explanation": "phases differ",
            }
        ],
        "plan": [{"op": "rotate", "exactness": "rounding"}],
    }
