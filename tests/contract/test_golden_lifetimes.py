"""Every lifetime of the corpus, played in process and over gRPC, gets the answers that its file says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvpact.handoff.handoff_table import ReceiverLimits
from tests.contract.golden.lifetime import Player
from tests.handoff_fakes import READER, WIRES, make_reader

TABLE = json.loads((Path(__file__).parent / "golden" / "lifetimes.json").read_text(encoding="utf-8"))
LIFETIMES = {lifetime["name"]: lifetime for lifetime in TABLE["lifetimes"]}
STEPS = {
    "pair",
    "reserve",
    "renew",
    "release",
    "push",
    "push_begin",
    "push_end",
    "decode",
    "drain",
    "advance",
}


async def play(lifetime: dict[str, Any], transport: str) -> None:
    told = TABLE["reader"]
    limits = ReceiverLimits(
        growth_watermark_blocks=0,
        lease_s=told["lease_s"],
        tombstone_s=told["tombstone_s"],
        reuse_prefixes=False,
    )
    reader = make_reader(blocks=lifetime.get("blocks", told["blocks"]), limits=limits)
    async with WIRES[transport](reader=reader) as wire:
        await Player(wire).play(lifetime["steps"])


@pytest.mark.parametrize("transport", WIRES)
@pytest.mark.parametrize("name", LIFETIMES)
async def test_a_lifetime_gets_the_answers_that_its_file_says(name: str, transport: str) -> None:
    await play(LIFETIMES[name], transport)


def other(value: Any) -> Any:
    """A value that isn't `value`."""
    if isinstance(value, list):
        return [*value, 0]
    return f"not {value}" if isinstance(value, str) or value is None else value + 1


@pytest.mark.parametrize("name", LIFETIMES)
async def test_any_other_expectation_fails(name: str) -> None:
    lifetime = LIFETIMES[name]
    for index, step in enumerate(lifetime["steps"]):
        for fact, value in step.get("expect", {}).items():
            if (step["do"], fact) == ("state", "handoffs"):
                continue
            changed = copy.deepcopy(lifetime)
            changed["steps"] = changed["steps"][: index + 1]
            changed["steps"][index]["expect"][fact] = other(value)
            with pytest.raises(AssertionError, match=f"step {index}, {step['do']}"):
                await play(changed, "in_process")


def test_every_kind_of_step_is_there_and_the_reader_is_the_one_told() -> None:
    assert {step["do"] for lifetime in LIFETIMES.values() for step in lifetime["steps"]} == STEPS | {"state"}
    told = TABLE["reader"]
    assert (told["worker"], told["block_size"]) == (READER.worker, make_reader().contract.layout.block_size)
