"""Cached keys rotated a second time: the convention is written down, so it converts or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.jsonform import contract_from_json, contract_to_json
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.errors import BadRequest
from kvpact.types import KeyState, PlanOp, VerdictWord
from tests.factories import make_contract
from tests.reference_cache import attend, pack, random_THD, stored_keys, turned_THD

torch.set_num_threads(1)
TOKENS = 20
SCALE = 0.25
RAW_THD = random_THD(tokens=TOKENS)
V_THD = random_THD(tokens=TOKENS, seed=1)
Q_HD = random_THD(tokens=1, seed=2)


def golden() -> torch.Tensor:
    """Attention of the next token without any cache."""
    rotary = make_contract().group_of(0).rotary
    keys = turned_THD(RAW_THD, rotary, list(range(TOKENS)))
    return attend(turned_THD(Q_HD, rotary, [TOKENS])[0], keys, V_THD, SCALE)


def decoded(reader: Contract, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """Attention of the next token on a decode side that treats landed keys as its own."""
    rotary = reader.group_of(0).rotary
    q_HD = rotate(Q_HD, rotation_at(rotary, rotary.tables[0], torch.tensor([TOKENS])))[0]
    if rotary.key_state is KeyState.RAW:
        k_THD = rotate(k_THD, rotation_at(rotary, rotary.tables[0], torch.arange(TOKENS)))
    return attend(q_HD, k_THD, v_THD, SCALE)


def land(writer: Contract, reader: Contract) -> tuple[torch.Tensor, torch.Tensor]:
    """The writer's two blocks, converted."""
    return Converter(writer, reader).convert(
        0,
        pack(stored_keys(RAW_THD, writer, list(range(TOKENS))), writer.layout),
        pack(V_THD, writer.layout),
        writer_block_start=0,
        writer_block_count=2,
        positions_T=torch.arange(TOKENS),
        rotations=RotationCache(),
    )


@pytest.mark.parametrize(
    ("writes", "reads", "op"),
    [
        (KeyState.ROTATED, KeyState.RAW, PlanOp.UNROTATE),
        (KeyState.RAW, KeyState.ROTATED, PlanOp.ROTATE),
    ],
)
def test_keys_in_the_other_state_are_converted_and_attend_the_same(
    writes: KeyState, reads: KeyState, op: PlanOp
) -> None:
    writer, reader = make_contract(key_state=writes), make_contract(key_state=reads)
    verdict = compare(writer, reader, Policy(), pairing_reach(writer, reader))
    assert verdict.word is VerdictWord.CONVERT
    assert [difference.field for difference in verdict.differences] == ["key_state"]
    assert [step.op for step in verdict.plan] == [op]
    torch.testing.assert_close(decoded(reader, *land(writer, reader)), golden(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("writes", [KeyState.ROTATED, KeyState.RAW])
def test_without_the_conversion_attention_is_visibly_wrong(writes: KeyState) -> None:
    writer = make_contract(key_state=writes)
    reader = make_contract(key_state=KeyState.RAW if writes is KeyState.ROTATED else KeyState.ROTATED)
    unconverted = decoded(reader, *land(writer, writer))
    assert (unconverted - golden()).abs().max() > 0.01


@pytest.mark.parametrize("reads", [KeyState.ROTATED, KeyState.RAW])
def test_keys_without_any_position_are_refused_by_a_side_that_rotates(reads: KeyState) -> None:
    writer, reader = make_contract(key_state=KeyState.NONE), make_contract(key_state=reads)
    verdict = compare(writer, reader, Policy(), 64)
    assert verdict.word is VerdictWord.REJECT
    assert [(difference.field, difference.layers) for difference in verdict.differences] == [
        ("key_state", (0, 1))
    ]


def _with_key_state(value: str | None) -> dict[str, Any]:
    values = contract_to_json(make_contract())
    for layer in values["layers"]:
        del layer["rotary"]["key_state"]
        if value is not None:
            layer["rotary"]["key_state"] = value
    return values


@pytest.mark.parametrize("value", [None, "unspecified", "", "Rotated twice"])
def test_an_absent_or_unknown_key_state_is_refused_and_never_guessed(value: str | None) -> None:
    with pytest.raises(BadRequest, match="key_state"):
        contract_from_json(_with_key_state(value))


def test_the_refusal_comes_from_the_key_state_alone() -> None:
    assert contract_from_json(_with_key_state("rotated")) == make_contract()
