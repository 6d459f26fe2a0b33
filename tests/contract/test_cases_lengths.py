"""Mistakes that short prompts hide: each conversion and each table at lengths around blocks and switches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.contract import Contract, LatentDims
from kvpact.contract.convert import RotationCache
from kvpact.contract.sources.cache_choice import CacheChoice
from kvpact.contract.sources.huggingface import contract_from_config
from kvpact.contract.tables import table_at
from kvpact.errors import BadRequest
from kvpact.handoff.terms import check_terms, tables_at
from kvpact.types import AxisOrder, Dtype, KeyState, LaneOrder, LayerKind, PlanOp, VerdictWord
from tests.contract.own_families import HEADS_16
from tests.factories import make_contract, make_group, make_rotary, with_layout, with_model, with_rotary
from tests.handoff_fakes import READER, all_parts, in_process_wire, make_reader, order_of, stream
from tests.reference_cache import attend, random_THD
from tests.reference_handoff import decoded, frozen_at, gap, handed_over, terms_of
from tests.reference_model import embedded, prefill, rotated

torch.set_num_threads(1)
SEED = 3
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 2048]
STATES = [KeyState.ROTATED, KeyState.RAW]


def latent() -> Contract:
    """One row of 32 content and 8 rotary lanes for all heads, amplitude 1, the scale's square apart."""
    group = make_group(
        kind=LayerKind.MLA_LATENT,
        kv_heads=1,
        key_dim=40,
        value_dim=32,
        softmax_scale=24**-0.5 * 1.873854,
        rotary=make_rotary(rotary_dim=8, lane_offset=32),
    )
    dims = LatentDims(latent_dim=32, rope_dim=8, content_first=True)
    return make_contract(layer_groups=(replace(group, latent=dims),))


def mixed() -> Contract:
    """Three windowed layers, and a last one that never turns."""
    windowed = make_group(layers=(0, 1, 2), kind=LayerKind.SLIDING, window=8)
    return make_contract(
        layer_groups=(windowed, make_group(layers=(3,), rotary=make_rotary(key_state=KeyState.NONE)))
    )


MODELS = {
    "whole head": make_contract(),
    "4 of 16 lanes": make_contract(rotary_dim=4),
    "8 of 16 lanes": make_contract(rotary_dim=8),
    "an amplitude": make_contract(amplitude=1.2079441),
    "one latent row": latent(),
    "a layer that never turns": mixed(),
}


def turned(contract: Contract, **changes: Any) -> Contract:
    """Changes of those layers that turn."""
    groups = tuple(
        group
        if group.rotary.key_state is KeyState.NONE
        else replace(group, rotary=replace(group.rotary, **changes))
        for group in contract.layer_groups
    )
    return replace(contract, layer_groups=groups)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], PlanOp]] = {
    "raw": ({"key_state": KeyState.RAW}, {}, PlanOp.ROTATE),
    "adjacent": ({"stored_lane_order": LaneOrder.ADJACENT}, {}, PlanOp.REORDER_LANES),
    "HND": ({}, {"axis_order": AxisOrder.HND}, PlanOp.RELAYOUT),
    "blocks of 32": ({}, {"block_size": 32}, PlanOp.REBLOCK),
    "blocks of 24": ({}, {"block_size": 24}, PlanOp.REBLOCK),
}
INVERSE = {PlanOp.ROTATE: PlanOp.UNROTATE}


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_each_conversion_attends_like_the_readers_own_cache_at_every_length(
    model: str, form: str, tokens: int
) -> None:
    base = MODELS[model]
    rotary, layout, op = FORMS[form]
    other = with_layout(turned(base, **rotary), **layout)
    for writer, reader, step in ((other, base, op), (base, other, INVERSE.get(op, op))):
        verdict = compare(writer, reader, Policy(), pairing_reach(writer, reader))
        assert (verdict.word, [part.op for part in verdict.plan]) == (VerdictWord.CONVERT, [step])
        assert attention_gap(writer, reader, tokens) < 2e-5


def attention_gap(writer: Contract, reader: Contract, tokens: int) -> float:
    """One query at the next position over landed keys, against the same without any cache; each layer."""
    positions, worst = list(range(tokens)), 0.0
    groups = [reader.group_of(layer) for layer in range(reader.layer_count())]
    keys = [
        random_THD(tokens=tokens, heads=group.kv_heads, width=group.key_dim, seed=layer)
        for layer, group in enumerate(groups)
    ]
    values = [
        random_THD(tokens=tokens, heads=group.kv_heads, width=group.value_dim, seed=9 + layer)
        for layer, group in enumerate(groups)
    ]
    landed = handed_over(writer, reader, keys, values)
    for layer, (group, k_THD, v_THD) in enumerate(zip(groups, *landed, strict=True)):
        raw = group.rotary.key_state is KeyState.RAW
        q_HD = rotated(
            group, random_THD(tokens=1, heads=group.kv_heads, width=group.key_dim, seed=7), [tokens]
        )
        seen = rotated(group, k_THD, positions) if raw else k_THD
        expected = attend(q_HD[0], rotated(group, keys[layer], positions), values[layer], group.softmax_scale)
        worst = max(worst, gap(attend(q_HD[0], seen, v_THD, group.softmax_scale), expected))
    return worst


@pytest.mark.parametrize("tokens", LENGTHS[1:])
def test_keys_rotated_a_second_time_give_other_logits_at_every_length_above_one(tokens: int) -> None:
    """What a reader would do that takes rotated keys for raw ones."""
    writer = make_contract()
    keys, values = random_THD(tokens=tokens), random_THD(tokens=tokens, seed=1)
    landed, landed_v = handed_over(writer, writer, [keys] * 2, [values] * 2)
    group, positions = writer.group_of(0), list(range(tokens))
    q_HD = rotated(group, random_THD(tokens=1, seed=7), [tokens])[0]
    right = attend(q_HD, landed[0], landed_v[0], group.softmax_scale)
    assert (
        gap(attend(q_HD, rotated(group, landed[0], positions), landed_v[0], group.softmax_scale), right)
        > 1e-3
    )


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_wider_numbers_are_the_writer_s_own_at_every_length(dtype: Dtype, tokens: int) -> None:
    writer, reader = make_contract(dtype=dtype), make_contract()
    assert compare(writer, reader, Policy(), 64).word is VerdictWord.CONVERT
    keys, values = random_THD(tokens=tokens), random_THD(tokens=tokens, seed=1)
    as_written = handed_over(writer, writer, [keys] * 2, [values] * 2)
    as_read = handed_over(writer, reader, [keys] * 2, [values] * 2)
    for written, read in zip(as_written, as_read, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(written, read, strict=True))


# ---------------------------------------------------------------- one path right, the other wrong


@pytest.mark.parametrize("order", LaneOrder)
def test_a_rotation_that_only_the_cache_gets_shows_in_the_writer_s_own_first_token(order: LaneOrder) -> None:
    contract = make_contract(layers=1, stored_lane_order=order)
    x_TE = embedded(SEED, 21)
    right, wrong = (prefill(contract, SEED, x_TE[:20], attends_raw=flag) for flag in (False, True))
    caches = [handed_over(contract, contract, made.keys, made.values) for made in (right, wrong)]
    assert torch.equal(caches[0][0][0], caches[1][0][0]), "a look at shipped bytes finds nothing"
    expected = prefill(contract, SEED, x_TE).output_TE
    assert gap(right.output_TE[-1], expected[19]) < 1e-9
    assert gap(wrong.output_TE[-1], expected[19]) > 1e-3
    assert gap(decoded(contract, SEED, x_TE, caches[1], 20), expected[20:]) < 1e-5


@pytest.mark.parametrize("order", LaneOrder)
def test_a_rotation_that_only_attention_gets_shows_in_the_shipped_bytes(order: LaneOrder) -> None:
    contract = make_contract(stored_lane_order=order)
    x_TE = embedded(SEED, 21)
    made, expected = prefill(contract, SEED, x_TE[:20]), prefill(contract, SEED, x_TE).output_TE
    raw = with_rotary(contract, key_state=KeyState.RAW)
    shipped, values = handed_over(raw, raw, made.keys, made.values)
    assert gap(made.output_TE[-1], expected[19]) < 1e-9, "a look at the first token finds nothing"
    assert gap(decoded(contract, SEED, x_TE, (shipped, values), 20), expected[20:]) > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_put_in_order_beside_sections_of_positions_too(interleaved: bool) -> None:
    """Text alone: all three rows are one. Sections say which row turns a pair, not which lanes pair."""
    writer, reader = (
        with_rotary(
            make_contract(stored_lane_order=order),
            mrope_sections=(4, 2, 2),
            mrope_interleaved=interleaved,
        )
        for order in (LaneOrder.ADJACENT, LaneOrder.HALF_SPLIT)
    )
    verdict = compare(writer, reader, Policy(), 64)
    assert [part.field for part in verdict.differences] == ["stored_lane_order"]
    assert [part.op for part in verdict.plan] == [PlanOp.REORDER_LANES]
    for tokens in LENGTHS:
        assert attention_gap(writer, reader, tokens) < 2e-5
    keys, values = [random_THD(tokens=33)] * 2, [random_THD(tokens=33, seed=1)] * 2
    (unmoved, _), (right, _) = (
        handed_over(writer, writer, keys, values),
        handed_over(writer, reader, keys, values),
    )
    assert torch.equal(unmoved[0], right[0]), "put back by their own order, both are the same keys"


# ---------------------------------------------------------------- tables that depend on the length

DYNAMIC: dict[str, Any] = HEADS_16 | {
    "model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 32,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}  # fmt: skip
LONGROPE: dict[str, Any] = HEADS_16 | {
    "model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 128,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 32,
    },
}  # fmt: skip


def serving(config: dict[str, Any], state: KeyState) -> Contract:
    return with_model(contract_from_config(config, cache=CacheChoice(key_state=state)), context_tokens=128)


REQUESTS = [(30, 70), (30, 32), (31, 31), (32, 32), (33, 33), (31, 33), (30, 40), (40, 70), (10, 60)]


@pytest.mark.parametrize(("prompt", "length"), REQUESTS)
@pytest.mark.parametrize("config", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("writes", STATES)
@pytest.mark.parametrize("reads", STATES)
def test_a_request_keeps_the_table_of_its_whole_length_across_a_switch(
    config: dict[str, Any], writes: KeyState, reads: KeyState, prompt: int, length: int
) -> None:
    """The golden: the whole sequence recomputed with the table that was frozen at the request's start."""
    writer, reader = serving(config, writes), serving(config, reads)
    last = max(length, prompt + 1)
    frozen = frozen_at(reader, last)
    x_TE = embedded(SEED, last)
    made, expected = prefill(frozen, SEED, x_TE[:prompt]), prefill(frozen, SEED, x_TE).output_TE[prompt:]
    cache = handed_over(writer, reader, made.keys, made.values, table_length=last)
    assert gap(decoded(frozen, SEED, x_TE, cache, prompt), expected) < 1e-5


@pytest.mark.parametrize("config", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_keys_of_the_short_table_under_the_long_one_give_another_output(config: dict[str, Any]) -> None:
    contract = serving(config, KeyState.ROTATED)
    x_TE = embedded(SEED, 40)
    frozen = frozen_at(contract, 40)
    made, expected = prefill(frozen, SEED, x_TE[:30]), prefill(frozen, SEED, x_TE).output_TE[30:]
    stale = handed_over(contract, contract, made.keys, made.values, table_length=30)
    assert gap(decoded(frozen, SEED, x_TE, stale, 30), expected) > 1e-4


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("config", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_terms_whose_keys_are_of_another_table_than_the_request_s_are_refused(
    config: dict[str, Any], state: KeyState
) -> None:
    contract = serving(config, state)
    terms = terms_of(contract, 30, table_length=40)
    check_terms(terms, contract, context_tokens=128)
    stale = replace(terms, tables=tables_at(contract, 30))
    with pytest.raises(BadRequest, match="isn't the table of the paired contract at this length"):
        check_terms(stale, contract, context_tokens=128)
    with pytest.raises(BadRequest) as refused:
        check_terms(replace(stale, table_length=29), contract, context_tokens=128)
    assert refused.value.param == "terms.table_length_tokens"


def test_requests_of_10_and_60_tokens_side_by_side_keep_their_own_tables() -> None:
    contract = serving(DYNAMIC, KeyState.RAW)
    rotary, positions = contract.group_of(0).rotary, torch.arange(10)
    caches = {length: RotationCache(table_length=length) for length in (10, 60)}
    found = {length: caches[length].rotation(rotary, 128, positions) for length in (60, 10, 60, 10)}
    for length, rotation in found.items():
        alone = RotationCache(table_length=length).rotation(rotary, 128, positions)
        assert torch.equal(rotation.cos, alone.cos)
    assert not torch.equal(found[10].cos, found[60].cos)
    table = table_at(rotary, length=10, context_tokens=128)
    assert table == table_at(rotary, length=32, context_tokens=128)


# ---------------------------------------------------------------- far positions, queries with a temperature


@pytest.mark.parametrize("start", [100_000, 131_040])
@pytest.mark.parametrize("writes", STATES)
def test_keys_far_out_are_turned_by_their_integer_positions(start: int, writes: KeyState) -> None:
    """A half's position there would be off by up to 256."""
    writer = make_contract(key_state=writes)
    reader = make_contract(key_state=KeyState.RAW if writes is KeyState.ROTATED else KeyState.ROTATED)
    keys, values = [random_THD(tokens=17)] * 2, [random_THD(tokens=17, seed=1)] * 2
    positions = list(range(start, start + 17))
    landed, _ = handed_over(writer, reader, keys, values, positions=positions)
    own, _ = handed_over(reader, reader, keys, values, positions=positions)
    assert gap(landed[0], own[0]) < 1e-5
    halves = torch.tensor(positions).to(torch.bfloat16).long().tolist()
    assert halves != positions
    wrong, _ = handed_over(make_contract(), make_contract(), keys, values, positions=halves)
    right, _ = handed_over(make_contract(), make_contract(), keys, values, positions=positions)
    assert gap(wrong[0], right[0]) > 0.1


def temperature(position: int) -> float:
    """What Llama 4 multiplies queries of its unturned layers with."""
    return 1 + 0.1 * math.log1p(math.floor((position + 1) / 8192))


async def test_a_prompt_from_position_8192_on_keeps_its_true_positions_though_no_key_turns() -> None:
    """Unturned keys land as they are; the query's own position still changes what it sees."""
    contract = make_contract(key_state=KeyState.NONE, context_tokens=16_384)
    positions = list(range(8192, 8192 + 40))
    reader = make_reader(contract=contract)
    async with in_process_wire(contract=contract, reader=reader) as wire:
        await wire.sender().pair(READER)
        terms = terms_of(contract, 40, positions=positions)
        parts = await all_parts(wire, terms)
        await wire.port.push(stream(parts))
        taken = reader.receiver.take(terms.handoff_id, READER, order_of(terms))
        assert (list(taken.positions), taken.next_position) == (positions, 8232)
        reader.pool.free(taken.blocks, "sequence")
    keys, values = [random_THD(tokens=40)] * 2, [random_THD(tokens=40, seed=1)] * 2
    landed, landed_v = handed_over(contract, contract, keys, values, positions=positions)
    assert torch.equal(landed[0], keys[0].double())
    q_HD = random_THD(tokens=1, seed=7)[0]
    assert (temperature(40), temperature(8232)) == (1.0, pytest.approx(1.0693147))
    told, counted = (
        attend(q_HD * temperature(position), landed[0], landed_v[0], 0.25)
        for position in (taken.next_position, len(landed[0]))
    )
    assert gap(told, attend(q_HD * 1.0693147, keys[0], values[0], 0.25)) < 1e-6
    assert gap(told, counted) > 1e-3
