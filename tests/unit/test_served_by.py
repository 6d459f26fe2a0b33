"""Other servers' rules for picking a rotary table, on contracts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.contract import Contract, FrequencyFormula, Rotary, RotaryTable
from kvpact.contract.rope import DYNAMIC_FORMULA, formula_table
from kvpact.contract.sources.served_by import SERVERS, apply_served_by
from kvpact.errors import BadRequest
from kvpact.types import FrequencyPolicy
from tests.factories import make_contract, make_group, make_inv_freq, make_rotary

SHORT = RotaryTable(inv_freq=make_inv_freq(theta=1e4), amplitude=1.25, upper_length=32)
LONG = RotaryTable(inv_freq=make_inv_freq(theta=1e6), amplitude=1.25)
FORMULA = FrequencyFormula(name=DYNAMIC_FORMULA, parameters=(1e4, 16.0, 2.0, 32.0))


def _contract(*, tables: tuple[RotaryTable, ...], formula: FrequencyFormula | None = None) -> Contract:
    rotary = replace(
        make_rotary(),
        frequency_policy=FrequencyPolicy.BY_REQUEST_LENGTH,
        tables=tables,
        formula=formula,
    )
    return make_contract(context_tokens=128, layer_groups=(make_group(rotary=rotary),))


LONGROPE = _contract(tables=(SHORT, LONG))
DYNAMIC = _contract(tables=(replace(SHORT, amplitude=1.0),), formula=FORMULA)


def _rotary(contract: Contract) -> Rotary:
    return contract.layer_groups[0].rotary


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
@pytest.mark.parametrize(
    ("served", "inv_freq"), [(31, SHORT), (32, SHORT), (33, LONG), (128, LONG), (None, LONG)]
)
def test_a_server_with_a_fixed_context_takes_one_longrope_table_for_good(
    server: str, served: int | None, inv_freq: RotaryTable
) -> None:
    rotary = _rotary(apply_served_by(LONGROPE, server, served))
    assert rotary.frequency_policy is FrequencyPolicy.BY_SERVED_LENGTH
    assert rotary.tables == (replace(inv_freq, upper_length=None),)


@pytest.mark.parametrize("contract", [LONGROPE, DYNAMIC])
def test_transformers_keeps_every_table_and_takes_them_by_current_length(contract: Contract) -> None:
    before, after = _rotary(contract), _rotary(apply_served_by(contract, "transformers"))
    assert after == replace(before, frequency_policy=FrequencyPolicy.BY_CURRENT_LENGTH)


def test_vllm_takes_dynamic_scaling_at_the_length_that_its_factor_promises() -> None:
    for served in (16, 128):
        rotary = _rotary(apply_served_by(DYNAMIC, "vllm", served))
        assert (rotary.formula, rotary.frequency_policy) == (None, FrequencyPolicy.BY_SERVED_LENGTH)
        assert rotary.tables == (replace(formula_table(FORMULA, 64), upper_length=None),)


@pytest.mark.parametrize("server", SERVERS)
def test_one_table_for_every_length_is_every_server_s(server: str) -> None:
    contract = make_contract()
    assert apply_served_by(contract, server, 8) == contract


def test_what_a_server_cant_do_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="no dynamic scaling"):
        apply_served_by(DYNAMIC, "llama.cpp")
    with pytest.raises(BadRequest, match=r"'sglang': expected one of transformers, vllm, llama\.cpp"):
        apply_served_by(LONGROPE, "sglang")
    with pytest.raises(BadRequest, match="at least 1"):
        apply_served_by(LONGROPE, "vllm", 0)
    with pytest.raises(BadRequest, match="by_served_length already"):
        apply_served_by(apply_served_by(LONGROPE, "vllm"), "transformers")
