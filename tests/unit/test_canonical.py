"""The canonical text is the sorted JSON of a contract's values; its digest is computed once per object."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

from hypothesis import given, settings

from kvpact.contract import identity
from kvpact.contract.canonical import PEOPLE_ONLY, canonical_text, contract_values
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from tests.factories import make_contract
from tests.strategies import contracts

GOLDEN_DIGEST = "15e1f00057bb34bfa3f7ff4e49528758118212317ad723147b6a1b99e4e971ba"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(contracts())
def test_the_text_put_together_is_the_text_dumped_whole(contract: Contract) -> None:
    values = {key: value for key, value in contract_values(contract).items() if key not in PEOPLE_ONLY}
    whole = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    assert canonical_text(contract) == whole


def test_a_text_that_looks_like_a_part_of_the_form_stays_a_text() -> None:
    odd = make_contract(architecture='"layers":[]"layer":0,"rotary":null')
    assert json.loads(canonical_text(odd))["architecture"] == odd.model.architecture


def test_equal_numbers_with_other_texts_keep_their_texts_whatever_was_digested_before() -> None:
    zeros = [make_contract(inv_freq=(1.0, *(0.5,) * 6, zero)) for zero in (0.0, -0.0)]
    texts = [canonical_text(contract) for contract in zeros]
    assert zeros[0] == zeros[1]
    assert texts[0] != texts[1]
    assert [canonical_text(contract) for contract in reversed(zeros)] == texts[::-1]


def test_the_digest_of_a_contract_is_what_it_was_in_every_release() -> None:
    assert contract_digest(make_contract()).hex() == GOLDEN_DIGEST


def test_a_digest_is_remembered_with_its_object_and_forgotten_with_it() -> None:
    contract = make_contract(theta=12345.0)
    digest, before = contract_digest(contract), len(identity._KNOWN)
    assert contract_digest(contract) is digest
    copied = replace(contract, model=replace(contract.model, name="another"))
    assert contract_digest(copied) == digest
    del contract, copied
    gc.collect()
    assert len(identity._KNOWN) < before
