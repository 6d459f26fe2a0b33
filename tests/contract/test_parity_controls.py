"""Parity passes on a right handoff and names where a wrong one first parts from the full forward."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from decode_worker.landing import CacheLanding, CacheLandingHandle
from kvpact.cli import parity as parity_command
from kvpact.cli.main import app
from kvpact.cli.parity_compare import QUANTITIES, LegReport
from kvpact.cli.parity_plot import draw
from kvpact.cli.parity_run import run_parity
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotate, rotation_at, unrotate
from kvpact.engine.engine import Engine
from kvpact.engine.probe import Reference
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms
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
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> CacheLandingHandle:
        handle = super().prepare(writer, verdict, terms, blocks, held_tokens=held_tokens)
        land, size = handle.land, writer.layout.block_size

        def damaged(header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
            land(header, keys, values)
            if header.layer in self.layers:
                start = header.block_start * size
                end = min(start + header.block_count * size, len(terms.token_ids))
                self._spoil(header.layer, blocks, torch.arange(start, end))

        handle.land = damaged  # type: ignore[method-assign]
        return handle

    def _spoil(self, layer: int, blocks: Sequence[BlockId], positions_T: torch.Tensor) -> None:
        cache, contract = self._cache, self._cache.contract
        slots_T = cache.slots(blocks, int(positions_T[0]), int(positions_T[-1]) + 1)
        rows_HT = cache.rows(slots_T, contract.group_of(layer).kv_heads)
        k_THD = cache.keys_at(layer, rows_HT).transpose(0, 1)
        v_THD = cache.values_at(layer, rows_HT).transpose(0, 1)
        if self.damage is swap_values:
            v_THD = self.damage(v_THD, contract, layer, positions_T)
        else:
            k_THD = self.damage(k_THD, contract, layer, positions_T)
        cache.put(layer, rows_HT, k_THD, v_THD)


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


def swap_values(
    v_THD: torch.Tensor, contract: Contract, layer: int, positions_T: torch.Tensor
) -> torch.Tensor:
    """Values of the two heads change places."""
    return v_THD.flip(1)


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


async def test_swapped_values_are_found_though_the_layer_s_logits_are_right(
    reference: Reference, engines: dict[str, Engine]
) -> None:
    (*_, report) = await handoff_legs(reference, engines, "rotated", swap_values, frozenset({1}))
    assert not report.passed
    assert max(report.attention_max_abs) <= report.tolerance, "logits come from queries and keys alone"
    assert report.divergence is None
    assert report.quantity("keys").first is None
    assert report.first is not None
    name, place = report.first
    assert (name, place.layer, place.head, place.position) == ("values", 1, 0, 0)
    outputs = report.quantity("attention_outputs").first
    assert outputs is not None
    assert (outputs.layer, outputs.position) == (1, report.prompt_tokens)


@pytest.mark.parametrize("lanes", ["half_split", "adjacent"])
async def test_each_quantity_is_compared_in_every_layer(
    folder: Path, reference: Reference, engines: dict[str, Engine], lanes: str
) -> None:
    reader = identified_engine(folder, blocks=16, stored_lane_order=lanes)
    reader.start()
    try:
        reports = [report async for report in run_parity(reference, engines["writer"], reader, (17,))]
    finally:
        reader.close()
    for report in reports:
        assert report.passed
        assert [quantity.name for quantity in report.quantities] == list(QUANTITIES)
        for quantity in report.quantities:
            assert len(quantity.max_abs) == len(quantity.max_rel) == 2
            positions = 1 if quantity.name == "attention_outputs" else 18
            assert quantity.by_position_Ln.shape == (2, positions)
            assert quantity.by_position_Ln.amax(dim=1).tolist() == pytest.approx(list(quantity.max_abs))
            assert all(
                0 < rel <= absolute for rel, absolute in zip(quantity.max_rel, quantity.max_abs, strict=True)
            )


@pytest.mark.parametrize(
    ("reader", "damage"), [("raw", leave_unrotate_out), ("rotated", swap_lanes), ("rotated", shift_positions)]
)
async def test_damaged_keys_are_the_first_to_differ_and_their_place_is_named(
    reference: Reference, engines: dict[str, Engine], reader: str, damage: Damage
) -> None:
    for report in await handoff_legs(reference, engines, reader, damage, frozenset({1})):
        assert report.first is not None
        name, place = report.first
        assert (name, place.layer, place.position) == ("keys", 1, FIRST_KEY_OFF[damage])
        off = report.quantity("keys").by_position_Ln
        assert float(off[0].max()) <= report.tolerance < float(off[1, : report.prompt_tokens].max())
        assert float(off[1, report.prompt_tokens]) <= report.tolerance, "the reader's own key is right"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
async def test_the_picture_is_written_and_marks_the_first_place(
    reference: Reference, engines: dict[str, Engine], tmp_path: Path, suffix: str
) -> None:
    landing = DamagedLanding(engines["rotated"], shift_positions, frozenset({1}))
    reports = await all_legs(reference, engines, "rotated", (33,), landing)
    file = tmp_path / f"damage{suffix}"
    draw(reports, file, model="tiny llama")
    data = file.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        assert min(width, height) > 500
    else:
        assert data.startswith(b"<?xml")
        assert b"</svg>" in data
        assert b"<image" in data, "each panel is a picture of layers by positions"


def test_the_command_draws_what_it_measured(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "parity.png"
    result = CliRunner().invoke(app, ["parity", str(folder), "--lengths", "1,17", "--plot", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")
    assert all(word in result.stdout for word in ("keys", "values", "outputs", "equal"))


@pytest.mark.parametrize("name", ["parity.pdf", "parity", "nowhere/parity.png"])
def test_a_picture_that_can_t_be_written_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, name: str
) -> None:
    result = CliRunner().invoke(app, ["parity", str(folder), "--plot", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "--plot" in result.stderr


def test_without_matplotlib_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["parity", str(folder), "--plot", "parity.png"])
    assert result.exit_code == 2
    assert "pip install 'kvpact[plot]'" in result.stderr


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
    for leg in legs:
        assert list(leg["quantities"]) == list(QUANTITIES)
        assert all(quantity["first"] is None for quantity in leg["quantities"].values())
        assert leg["logits_max_rel"] <= leg["logits_max_abs"] <= 1e-4


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
