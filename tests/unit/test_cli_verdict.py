"""`kvpact handoff verdict` prints the whole verdict that a running decode worker gave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from tests.factories import make_contract
from tests.handoff_fakes import READER, grpc_wire

OTHER = make_contract(theta=500.0)
NOBODY = "127.0.0.1:1"


async def ask(writer: Contract, *more: str, asked: Contract | None = None) -> tuple[int, dict[str, Any]]:
    """Pairs a writer with a reader over gRPC and asks the reader by the command."""
    async with grpc_wire(contract=writer) as wire:
        await wire.sender().pair(READER)
        digest = contract_digest(asked or writer).hex()
        command = ["handoff", "verdict", wire.port.endpoint, digest, *more, "--json"]  # type: ignore[attr-defined]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        return result.exit_code, dict(json.loads(result.stdout))


async def test_a_refusal_is_told_as_a_whole() -> None:
    code, verdict = await ask(OTHER)
    assert (code, verdict["verdict"]) == (20, "reject")
    assert [each["field"] for each in verdict["differences"]] == ["inv_freq"]
    assert verdict["differences"][0]["explanation"]


async def test_a_usable_pair_exits_0() -> None:
    assert (await ask(make_contract()))[0] == 0


async def test_a_pair_that_was_never_judged_exits_2() -> None:
    code, answer = await ask(make_contract(), asked=OTHER)
    assert (code, answer["error"]["param"]) == (2, "writer_digest")
    code, answer = await ask(make_contract(), "--reader", contract_digest(OTHER).hex())
    assert (code, answer["error"]["reason"]) == (2, "BAD_REQUEST")


@pytest.mark.parametrize("digest", ["", "abc", "zz" * 32, "ab" * 31])
def test_what_is_no_digest_exits_2_and_says_what_one_is(digest: str) -> None:
    result = CliRunner().invoke(app, ["handoff", "verdict", NOBODY, digest, "--json"])
    assert result.exit_code == 2
    assert "64 hexadecimal digits" in json.loads(result.stdout)["error"]["message"]


def test_nobody_there_exits_3() -> None:
    result = CliRunner().invoke(app, ["handoff", "verdict", NOBODY, "ab" * 32, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]["source"]) == (3, NOBODY)
