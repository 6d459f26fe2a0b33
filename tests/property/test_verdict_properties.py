"""Over tiny models a verdict keeps its word: what passes is the reader's own cache, what doesn't differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import AttentionTemperature, Contract, LayerGroup, RotaryTable
from kvpact.contract.convert import TORCH_DTYPES, Converter, RotationCache
from kvpact.contract.rotation import lane_permutation
from kvpact.errors import DataLoss
from kvpact.types import DifferenceAction, Dtype, KeyState, LaneOrder, LayerKind, VerdictWord
from tests.factories import make_contract, make_group, make_inv_freq, make_rotary, with_group
from tests.reference_cache import in_lane_order, pack_layer, stored_keys
from tests.reference_model import Prefill, decode, embedded, prefill
from tests.strategies import cache_forms

torch.set_num_threads(1)
TOKENS = 37
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
BASE = replace(
    make_rotary(rotary_dim=8, amplitude=1.1),
    lane_offset=4,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    """Two layers with facts of their own."""
    return tuple(_layer(layer, draw) for layer in (0, 1))


def _layer(layer: int, draw: st.DrawFn) -> LayerGroup:
    kind = draw(st.sampled_from((LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED)))
    group = make_group(
        layers=(layer,),
        kind=kind,
        window=None if kind is LayerKind.FULL else draw(st.sampled_from((8, 16))),
        softmax_scale=draw(st.sampled_from((0.25, 0.4))),
        rotary=replace(BASE, lane_offset=draw(st.sampled_from((0, 4)))),
    )
    return replace(
        group,
        softcap=draw(st.sampled_from((None, 5.0))),
        sinks=draw(st.booleans()),
        temperature=draw(st.sampled_from((None, AttentionTemperature(formula="ramp", parameters=(0.5,))))),
    )


def as_form(groups: tuple[LayerGroup, ...], form: dict[str, Any]) -> Contract:
    """A contract of these layers in one side's form."""
    turned = {"key_state": form["key_state"], "stored_lane_order": form["stored_lane_order"]}
    own = tuple(replace(group, rotary=replace(group.rotary, **turned)) for group in groups)
    facts = {name: form[name] for name in ("axis_order", "block_size", "dtype")}
    return make_contract(layer_groups=own, **facts)


def handed_over(
    writer: Contract, reader: Contract, made: Prefill
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The writer's cache as bytes, landed at the reader: keys in its key_state, half-split, and values."""
    converter, positions = Converter(writer, reader), list(range(TOKENS))
    keys, values = [], []
    for layer in range(writer.layer_count()):
        raw = in_lane_order(made.keys[layer], writer.group_of(layer).rotary)
        v_THD = made.values[layer].to(TORCH_DTYPES[writer.layout.value_dtype])
        landed = converter.land(
            layer,
            *pack_layer(stored_keys(raw, writer, positions, layer), v_THD, writer.layout),
            writer_block_start=0,
            writer_block_count=-(-TOKENS // writer.layout.block_size),
            positions_T=torch.arange(TOKENS),
            rotations=RotationCache(),
        )
        group = reader.group_of(layer)
        lanes = lane_permutation(group.rotary, LaneOrder.HALF_SPLIT, group.key_dim) or range(group.key_dim)
        keys.append(landed.keys.double()[..., list(lanes)])
        values.append(landed.values.double())
    return keys, values


def gap(writer: Contract, reader: Contract, seed: int) -> float:
    """Largest difference that a user could see: in the first token's output, or in the next one's."""
    x_TE = embedded(seed, TOKENS + 1)
    theirs, own = (prefill(side, seed, x_TE[:TOKENS]) for side in (writer, reader))
    found = decode(reader, seed, x_TE[TOKENS], *handed_over(writer, reader, theirs))
    expected = prefill(reader, seed, x_TE).output_TE[TOKENS]
    first = float((theirs.output_TE[-1] - own.output_TE[-1]).abs().max())
    return max(first, float((found - expected).abs().max()))


@few
@given(groups=layers(), writes=cache_forms(), reads=cache_forms(), seed=st.integers(0, 99))
def test_what_is_accepted_or_converted_attends_like_the_readers_own_prefill(
    groups: tuple[LayerGroup, ...], writes: dict[str, Any], reads: dict[str, Any], seed: int
) -> None:
    writer, reader = as_form(groups, writes), as_form(groups, reads)
    assert compare(writer, reader, Policy(lossy="allow"), TOKENS + 1).word is not VerdictWord.REJECT
    narrowest = max(torch.finfo(TORCH_DTYPES[side.layout.key_dtype]).eps for side in (writer, reader))
    assert gap(writer, reader, seed) <= 40 * narrowest


def _other_table(group: LayerGroup) -> LayerGroup:
    table = RotaryTable(inv_freq=make_inv_freq(theta=1e3, rotary_dim=8), amplitude=1.1)
    return replace(group, rotary=replace(group.rotary, tables=(table,)))


def _other_amplitude(group: LayerGroup) -> LayerGroup:
    table = replace(group.rotary.tables[0], amplitude=1.2)
    return replace(group, rotary=replace(group.rotary, tables=(table,)))


def _fewer_lanes(group: LayerGroup) -> LayerGroup:
    table = RotaryTable(inv_freq=group.rotary.tables[0].inv_freq[:2], amplitude=1.1)
    return replace(group, rotary=replace(group.rotary, rotary_dim=4, tables=(table,)))


def _not_rotated(group: LayerGroup) -> LayerGroup:
    none = make_rotary(key_state=KeyState.NONE)
    return replace(group, rotary=none)


MUTATIONS = {
    "inv_freq": _other_table,
    "amplitude": _other_amplitude,
    "rotary_dim": _fewer_lanes,
    "key_state": _not_rotated,
    "lane_offset": lambda group: replace(
        group, rotary=replace(group.rotary, lane_offset=4 - group.rotary.lane_offset)
    ),
    "softmax_scale": lambda group: replace(group, softmax_scale=0.3),
    "softcap": lambda group: replace(group, softcap=3.0),
    "sinks": lambda group: replace(group, sinks=not group.sinks),
    "temperature": lambda group: replace(
        group, temperature=AttentionTemperature(formula="ramp", parameters=(0.75,))
    ),
    "window": lambda group: replace(group, kind=LayerKind.SLIDING, window=11),
    "kind": lambda group: replace(
        group, window=16, kind=LayerKind.CHUNKED if group.kind is LayerKind.SLIDING else LayerKind.SLIDING
    ),
    "value_dim": lambda group: replace(group, value_dim=12),
    "key_dim": lambda group: replace(group, key_dim=20),
}


@pytest.mark.parametrize("field", MUTATIONS)
@settings(few, max_examples=12)
@given(
    groups=layers(),
    writes=cache_forms(),
    reads=cache_forms(),
    layer=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_what_is_refused_for_a_layers_field_differs_or_can_not_be_landed(
    field: str,
    groups: tuple[LayerGroup, ...],
    writes: dict[str, Any],
    reads: dict[str, Any],
    layer: int,
    seed: int,
) -> None:
    changed = tuple(MUTATIONS[field](group) if group.layers == (layer,) else group for group in groups)
    exact = {"dtype": Dtype.FLOAT32}
    writer, reader = as_form(groups, writes | exact), as_form(changed, reads | exact)
    if field == "key_state":
        reader = replace(reader, layer_groups=_keeping_none(reader, layer))
    verdict = compare(writer, reader, Policy(lossy="allow"), TOKENS + 1)
    refused = [part for part in verdict.differences if part.action is DifferenceAction.REJECT]
    assert field in [part.field for part in refused]
    assert all(part.layers == (layer,) for part in refused)
    try:
        difference = gap(writer, reader, seed)
    except (DataLoss, RuntimeError, IndexError):
        assert field in ("value_dim", "key_dim")
        return
    assert difference > 1e-5, "the rounding of float32 stays below this"


def _keeping_none(contract: Contract, layer: int) -> tuple[LayerGroup, ...]:
    """`layer` without rotation, whatever the form says of the others."""
    return tuple(
        _not_rotated(group) if group.layers == (layer,) else group for group in contract.layer_groups
    )


@few
@given(writes=cache_forms(), reads=cache_forms(), seed=st.integers(0, 9))
def test_a_table_that_counts_as_rounding_moves_the_output_by_no_more_than_its_phase(
    writes: dict[str, Any], reads: dict[str, Any], seed: int
) -> None:
    groups = (make_group(layers=(0, 1), rotary=make_rotary()),)
    near = tuple(float(torch.tensor(number * (1 + 2e-4))) for number in make_inv_freq())
    exact = {"dtype": Dtype.FLOAT32}
    writer = as_form(groups, writes | exact)
    table = RotaryTable(inv_freq=near, amplitude=1.0)
    reader = with_group(as_form(groups, reads | exact))
    reader = replace(
        reader,
        layer_groups=tuple(
            replace(group, rotary=replace(group.rotary, tables=(table,))) for group in reader.layer_groups
        ),
    )
    verdict = compare(writer, reader, Policy(), TOKENS + 1)
    assume(verdict.word is not VerdictWord.REJECT)
    assert 1e-9 < gap(writer, reader, seed) < 0.1


def test_a_writer_that_rotates_for_the_cache_only_ships_right_bytes_and_a_wrong_first_token() -> None:
    contract = make_contract(layers=1)
    x_TE = embedded(0, TOKENS)
    right, wrong = (prefill(contract, 0, x_TE, attends_raw=flag) for flag in (False, True))
    assert torch.equal(right.keys[0], wrong.keys[0]), "a look at shipped bytes finds nothing"
    assert (right.output_TE[-1] - wrong.output_TE[-1]).abs().max() > 1e-3
    deeper = [prefill(make_contract(), 0, x_TE, attends_raw=flag) for flag in (False, True)]
    assert (deeper[0].keys[1] - deeper[1].keys[1]).abs().max() > 1e-3
