"""The protocol page says what the code does: fields, steps, errors, record kinds, digests by recipe."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvpact.contract.contract import Contract
from kvpact.contract.findings import REMEDIES
from kvpact.contract.identity import contract_digest, function_digest, tensor_digest
from kvpact.contract.jsonform import contract_to_json
from kvpact.errors import ERROR_CODES
from kvpact.handoff.capture_codec import RecordKind
from kvpact.handoff.capture_file import MAGIC, VERSION
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.terms import digest_tokens
from kvpact.types import ContractDigest, DifferenceAction, PlanOp
from tests.factories import make_contract
from tests.handoff_samples import full_chunk, full_contract
from tests.repo.tree import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
VERDICT = PAGE.split("## 3.")[1].split("## 4.")[0]
ERRORS = PAGE.split("## 5.")[1].split("## 6.")[0]
CAPTURES = PAGE.split("## 6.")[1].split("## 7.")[0]


def test_every_field_that_can_differ_is_in_the_table_and_no_other() -> None:
    rows = [line for line in VERDICT.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(REMEDIES)


def test_steps_are_listed_in_the_order_of_plans() -> None:
    listed = VERDICT.split("A plan is made of ")[1].split(", in this order")[0]
    assert re.findall(r"`(\w+)`", listed) == [op.value for op in PlanOp]


def test_every_reason_is_listed_with_its_code() -> None:
    listed = dict(re.findall(r"\| `([A-Z_]+)` \| ([A-Z_]+) \|", ERRORS))
    assert listed == {error.reason: code.grpc for error, code in ERROR_CODES.items()}


def test_record_kinds_magic_and_version_are_the_code_s() -> None:
    kinds = {int(number): name for number, name in re.findall(r"\| (\d) \| `([\w.]+)`", CAPTURES)}
    spelled = {kind: name.rsplit(".")[-1].upper() for kind, name in kinds.items()}
    assert spelled == {kind.value: kind.name.replace("_", "") for kind in RecordKind}
    assert MAGIC.hex(" ").upper() in CAPTURES
    assert re.search(rf"version +u32 +{VERSION}\n", CAPTURES)


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


@pytest.mark.parametrize("contract", [make_contract(), full_contract()], ids=["small", "full"])
def test_a_contract_digest_follows_from_its_file(contract: Contract) -> None:
    values = contract_to_json(contract)
    for left_out in ("digest", "name", "revision", "engine"):
        values.pop(left_out, None)
    assert contract_digest(contract) == hashlib.sha256(canonical(values)).digest()


def test_tensor_function_and_token_digests_follow_their_recipes() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = hashlib.sha256(b"2,3\n" + struct.pack("<6f", *range(6))).hexdigest()
    assert tensor_digest(rows) == tensor
    expected = hashlib.sha256(canonical({"facts": {"eps": 0.5}, "tensors": {"w": tensor}})).digest()
    assert function_digest([("w", rows)], {"eps": 0.5}) == expected
    assert digest_tokens((1, 258)) == hashlib.sha256(struct.pack("<2i", 1, 258)).digest()


def test_a_chunk_s_checksum_follows_its_recipe() -> None:
    chunk, contract, tokens = full_chunk(), b"c" * 32, b"t" * 32
    header = chunk.header
    numbers = (
        *(header.generation, header.sequence, header.layer, header.block_start, header.block_count),
        *(header.key_bytes, header.value_bytes),
    )
    data = header.handoff_id + struct.pack("<7q", *numbers) + contract + tokens
    expected = xxhash.xxh3_64_intdigest(data + bytes(chunk.keys) + bytes(chunk.values))
    assert chunk_checksum(header, ContractDigest(contract), tokens, chunk.keys, chunk.values) == expected
    scaled = replace(header, key_scales=(0.5,), value_scales=(2.0, 4.0))
    data = header.handoff_id + struct.pack("<7q2q3f", *numbers, 1, 2, 0.5, 2.0, 4.0) + contract + tokens
    expected = xxhash.xxh3_64_intdigest(data + bytes(chunk.keys) + bytes(chunk.values))
    assert chunk_checksum(scaled, ContractDigest(contract), tokens, chunk.keys, chunk.values) == expected


def test_actions_are_named_as_the_code_names_them() -> None:
    assert all(action.value in VERDICT for action in DifferenceAction)
