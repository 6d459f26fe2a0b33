"""Parity passes on a right handoff and names where a wrong one first parts from the full forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode_worker.landing import CacheLanding, CacheLandingHandle
from kvpact.cli import parity as parity_command
from kvpact.cli.main import app
from kvpact.cli.parity_run import LegReport, run_parity
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.engine.engine import Engine
from kvpact.engine.probe import Reference
from kvpact.handoff.messages import Buffer, HandoffTerms
from kvpact.types import BlockId, Verdict
from tests.fakes import identified_engine, make_tiny_model

LENGTHS = (15, 16, 33)
Damage = Callable[[torch.Tensor, Contract, int, torch.Tensor], torch.Tensor]


class DamagedLanding(CacheLanding):
    """Lands as the real one does, then damages keys of chosen layers before they are stored."""

    def __init__(self, engine: Engine, damage: Damage, layers: frozenset[int]) -> None:
        super().__init__(engine.cache)
        self.damage = damage
        self.layers = layers

    def prepare(
        self, writer: Contract, verdict: Verdict, terms: HandoffTerms, blocks: Sequence[BlockId]
    ) -> CacheLandingHandle:
        handle = super().prepare(writer, verdict, terms, blocks)
        convert = handle._converter.convert

        def damaged(layer: int, *payloads: Buffer, **places: Any) -> tuple[torch.Tensor, torch.Tensor]:
            k_THD, v_THD = convert(layer, *payloads, **places)
            if layer in self.layers:
                k_THD = self.damage(k_THD, self._cache.contract, layer, places["positions_T"])
            return k_THD, v_THD

        handle._converter.convert = damaged  # type: ignore[method-assign]
        return handle


def leave_unrotate_out(
    k_THD: torch.Tensor, contract: Contract, layer: int, positions_T: torch.Tensor
) -> torch.Tensor:
    """The reader rotates its raw keys on read; these are rotated already, so they end up rotated twice."""
    rotary = contract.group_of(layer).rotary
    return rotate(k_THD, rotation_at(rotary, rotary.tables[0], positions_T))


def swap_lanes(
    k_THD: torch.Tensor, contract: Contract, layer: int, positions_T: torch.Tensor
) -> torch.Tensor:
    return k_THD.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def shift_positions(
    k_THD: torch.Tensor, contract: Contract, layer: int, positions_T: torch.Tensor
) -> torch.Tensor:
    rotary = contract.group_of(layer).rotary
    raw_THD = unrotate(k_THD, rotation_at(rotary, rotary.tables[0], positions_T))
    return rotate(raw_THD, rotation_at(rotary, rotary.tables[0], positions_T + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    made = {state: identified_engine(folder, blocks=16, key_state=state) for state in ("rotated", "raw")}
    made["writer"] = identified_engine(folder, blocks=16)
    for engine in made.values():
        engine.start()
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference.load(folder, {})


async def all_legs(
    reference: Reference,
    engines: dict[str, Engine],
    reader: str,
    lengths: Sequence[int],
    landing: DamagedLanding | None = None,
) -> list[LegReport]:
    legs = run_parity(reference, engines["writer"], engines[reader], lengths, landing=landing)
    return [report async for report in legs]


async def handoff_legs(
    reference: Reference, engines: dict[str, Engine], reader: str, damage: Damage, layers: frozenset[int]
) -> list[LegReport]:
    landing = DamagedLanding(engines[reader], damage, layers)
    reports = await all_legs(reference, engines, reader, LENGTHS, landing)
    assert all(report.passed for report in reports if report.leg == "cached")
    return [report for report in reports if report.leg == "handoff"]


FIRST_KEY_OFF = {leave_unrotate_out: 1, swap_lanes: 0, shift_positions: 0}
"""Position 0 has angle 0, so turning its key twice leaves it as it is."""


@pytest.mark.parametrize("reader", ["rotated", "raw"])
async def test_a_right_handoff_passes_at_every_length(
    reference: Reference, engines: dict[str, Engine], reader: str
) -> None:
    reports = await all_legs(reference, engines, reader, LENGTHS)
    assert [report.passed for report in reports] == [True] * (2 * len(LENGTHS))


@pytest.mark.parametrize(
    ("reader", "damage"),
    [("raw", leave_unrotate_out), ("rotated", swap_lanes), ("rotated", shift_positions)],
    ids=["keys rotated twice", "lanes swapped", "positions shifted by one"],
)
@pytest.mark.parametrize("broken_from", [0, 1], ids=["every layer", "second layer only"])
async def test_damage_fails_and_its_first_layer_and_position_are_named(
    reference: Reference, engines: dict[str, Engine], reader: str, damage: Damage, broken_from: int
) -> None:
    layers = frozenset({0, 1} - set(range(broken_from)))
    for report in await handoff_legs(reference, engines, reader, damage, layers):
        assert not report.passed
        assert report.logits_max_abs > 1e-3
        assert report.divergence is not None
        assert report.divergence.layer == broken_from
        assert report.divergence.position == report.prompt_tokens
        assert report.divergence.key_position == FIRST_KEY_OFF[damage]


async def test_a_doubled_rotation_spares_position_zero(
    reference: Reference, engines: dict[str, Engine]
) -> None:
    landing = DamagedLanding(engines["raw"], leave_unrotate_out, frozenset({0, 1}))
    reports = await all_legs(reference, engines, "raw", (1,), landing)
    assert all(report.passed for report in reports), "angle 0 hides it, so a one-token prompt is no evidence"


def test_the_command_reports_every_leg_as_json(folder: Path) -> None:
    result = CliRunner().invoke(app, ["parity", str(folder), "--lengths", "1,17", "--json"])
    assert result.exit_code == 0, result.output
    legs = json.loads(result.stdout)["legs"]
    assert [(leg["leg"], leg["prompt_tokens"], leg["passed"]) for leg in legs] == [
        ("cached", 1, True),
        ("handoff", 1, True),
        ("cached", 17, True),
        ("handoff", 17, True),
    ]
    assert all(max(leg["attention_max_abs"]) <= 1e-4 for leg in legs)


def test_the_command_names_what_diverged(
    folder: Path, reference: Reference, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged_run(config: object, lengths: tuple[int, ...]) -> list[LegReport]:
        landing = DamagedLanding(engines["rotated"], shift_positions, frozenset({0, 1}))
        return await all_legs(reference, engines, "rotated", lengths, landing)

    monkeypatch.setattr(parity_command, "_run", damaged_run)
    result = CliRunner().invoke(app, ["parity", str(folder), "--lengths", "17"], terminal_width=160)
    assert result.exit_code == 1
    assert "diverges at layer 0, position 17" in " ".join(result.stdout.split())


def test_a_refused_cache_exits_20(folder: Path) -> None:
    arguments = ["parity", str(folder), "--lengths", "5", "--decode-override", "rope_theta=500", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 20, result.output
    assert json.loads(result.stdout)["error"]["fields"] == "inv_freq"
