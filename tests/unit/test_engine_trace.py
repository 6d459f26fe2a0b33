"""A parity report names the first attention logit that is off, by layer and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpact.contract.rotation import Rotation, rotate, rotation_at
from kvpact.engine import attention
from kvpact.engine.attention import GroupStep
from kvpact.engine.engine import Engine
from kvpact.engine.probe import Reference, Trace, engine_trace
from kvpact.engine.trace import Divergence, LogitRecorder, first_divergence
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import LaneOrder
from tests.fakes import load_engine, make_tiny_model, prompt_of

PROMPT, TOKENS = 33, 6
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope="llama3")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = load_engine(folder)
    engine.start()
    yield engine
    engine.close()


def reference_for(folder: Path, found: Trace) -> Trace:
    whole = (*prompt_of(PROMPT), *found.token_ids)
    return Reference.load(folder, {}).trace(whole, range(PROMPT - 1, len(whole)))


def spoil_stored_keys(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Rotation], Rotation]) -> None:
    """From now on every key that the cache gives out is turned by its own angles again, `spoil`ed."""
    prepare = attention.attend_layer

    def attend(cache: PagedCache, layer: int, step: GroupStep, *qkv: torch.Tensor) -> torch.Tensor:
        table = step.group.rotary.tables[0]
        bundles = []
        for bundle in step.bundles:
            (positions,) = bundle.key_positions
            angles = rotation_at(step.group.rotary, table, positions)
            shape = (1, 1, positions.numel(), -1)
            turned = spoil(replace(angles, cos=angles.cos.view(shape), sin=angles.sin.view(shape)))
            bundles.append(replace(bundle, key_rotation=turned))
        return prepare(cache, layer, replace(step, bundles=tuple(bundles)), *qkv)

    monkeypatch.setattr("kvpact.engine.batch.attend_layer", attend)


def test_a_sound_engine_diverges_nowhere(folder: Path, engine: Engine) -> None:
    found = engine_trace(engine, prompt_of(PROMPT), TOKENS)
    reference = reference_for(folder, found)
    assert first_divergence(reference.attention, found.attention, TOLERANCE) is None
    assert len(found.attention.logits) == 2 * TOKENS
    assert found.token_ids == reference.token_ids[:TOKENS]
    assert (found.logits_nV - reference.logits_nV[:TOKENS]).abs().max() < TOLERANCE


def test_keys_rotated_twice_are_found_in_the_first_layer(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_stored_keys(monkeypatch, lambda rotation: rotation)
    found = engine_trace(engine, prompt_of(PROMPT), TOKENS)
    divergence = first_divergence(reference_for(folder, found).attention, found.attention, TOLERANCE)
    assert divergence is not None
    assert (divergence.layer, divergence.position) == (0, PROMPT - 1)
    assert 0 <= divergence.key_position <= PROMPT - 1


def test_keys_one_position_off_are_found_in_the_first_layer(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_one(rotation: Rotation) -> Rotation:
        return replace(rotation, cos=rotation.cos[..., 1:2, :], sin=rotation.sin[..., 1:2, :])

    spoil_stored_keys(monkeypatch, by_one)
    found = engine_trace(engine, prompt_of(PROMPT), TOKENS)
    divergence = first_divergence(reference_for(folder, found).attention, found.attention, TOLERANCE)
    assert divergence is not None
    assert divergence.layer == 0


def test_swapped_lanes_are_found_in_the_first_layer(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotate(x, replace(rotation, lane_order=LaneOrder.ADJACENT))

    monkeypatch.setattr(attention, "rotate", swapped)
    found = engine_trace(engine, prompt_of(PROMPT), TOKENS)
    divergence = first_divergence(reference_for(folder, found).attention, found.attention, TOLERANCE)
    assert divergence is not None
    assert divergence.layer == 0


def test_the_lowest_layer_comes_before_the_lowest_position() -> None:
    reference, found = LogitRecorder(), LogitRecorder()
    for layer in range(2):
        for position in range(3):
            reference.logits[layer, position] = torch.zeros((4, position + 1))
            found.logits[layer, position] = torch.zeros((4, position + 1))
    found.logits[1, 0][2, 0] = 0.5
    found.logits[0, 2][3, 1] = -0.25
    assert first_divergence(reference, found, TOLERANCE) == Divergence(
        layer=0, position=2, head=3, key_position=1, reference=0.0, found=-0.25
    )


def test_a_nan_diverges() -> None:
    reference, found = LogitRecorder(), LogitRecorder()
    reference.logits[0, 0], found.logits[0, 0] = torch.zeros((4, 1)), torch.full((4, 1), torch.nan)
    assert first_divergence(reference, found, TOLERANCE) is not None
