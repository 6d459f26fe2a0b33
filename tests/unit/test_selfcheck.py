"""The self-check passes what the model computes and fails every way of getting rotation wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpact.contract.contract import Contract, LayerGroup
from kvpact.contract.rotation import Rotation, rotate
from kvpact.engine import attention, batch, loading
from kvpact.engine.loading import load
from kvpact.engine.selfcheck import make_probe
from kvpact.errors import SelfCheckFailed
from kvpact.types import LaneOrder, LayerKind
from tests.factories import make_contract, make_group, with_model
from tests.fakes import engine_settings, load_engine, make_tiny_model

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope="llama3")


def with_another_contract(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[LayerGroup], LayerGroup]
) -> None:
    """The engine derives a contract whose groups were changed; the model stays as it is."""
    derive = loading.contract_from_config

    def derive_another(*arguments: object, **facts: object) -> Contract:
        contract = derive(*arguments, **facts)  # type: ignore[arg-type]
        return replace(contract, layer_groups=tuple(change(group) for group in contract.layer_groups))

    monkeypatch.setattr(loading, "contract_from_config", derive_another)


def test_the_probe_holds_the_first_and_the_largest_positions() -> None:
    contract = with_model(make_contract(), context_tokens=4096)
    probe = make_probe(264, contract)
    assert probe.positions == (*range(9), *range(4087, 4096))
    assert all(0 <= token < 264 for token in probe.token_ids)
    assert make_probe(264, with_model(contract, context_tokens=5)).positions == (0, 1, 2, 3, 4)


def test_the_probe_stands_on_both_sides_of_a_windows_edge() -> None:
    group = make_group(kind=LayerKind.SLIDING, window=100)
    contract = with_model(make_contract(layer_groups=(group,)), context_tokens=4096)
    assert {4095 - 99, 4095 - 100} <= set(make_probe(264, contract).positions)


def test_a_window_that_is_off_by_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    folder = make_tiny_model(tmp_path / "windowed", model_type="qwen3", **windows)
    load(engine_settings(folder))
    with_another_contract(monkeypatch, lambda group: replace(group, window=41))
    with pytest.raises(SelfCheckFailed):
        load(engine_settings(folder))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_state", ["raw", "rotated"])
def test_the_models_own_numbers_pass(folder: Path, dtype: str, key_state: str) -> None:
    load(engine_settings(folder, compute_dtype=dtype, key_state=key_state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama3_scaling_that_was_dropped_fails_in_the_first_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    theta, lanes = 10000.0, torch.arange(0, 16, 2) / 16
    unscaled = tuple((1.0 / theta**lanes).tolist())

    def drop(group: LayerGroup) -> LayerGroup:
        table = replace(group.rotary.tables[0], inv_freq=unscaled)
        return replace(group, rotary=replace(group.rotary, tables=(table,)))

    with_another_contract(monkeypatch, drop)
    with pytest.raises(SelfCheckFailed, match="layer 0, query differs"):
        load(engine_settings(folder, compute_dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_amplitude_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    def amplify(group: LayerGroup) -> LayerGroup:
        table = replace(group.rotary.tables[0], amplitude=1.1)
        return replace(group, rotary=replace(group.rotary, tables=(table,)))

    with_another_contract(monkeypatch, amplify)
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        load(engine_settings(folder, compute_dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_softmax_scale_fails_after_the_first_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    with_another_contract(monkeypatch, lambda group: replace(group, softmax_scale=group.softmax_scale * 1.2))
    with pytest.raises(SelfCheckFailed, match="layer 1"):
        load(engine_settings(folder, compute_dtype=dtype))


def test_keys_rotated_twice_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotate(rotate(x, rotation), rotation)

    monkeypatch.setattr(attention, "rotate", twice)
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        load_engine(folder)


def test_raw_keys_that_are_not_rotated_on_reading_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch.Step, "_key_rotation", lambda *_: None)
    load_engine(folder, key_state="rotated")
    with pytest.raises(SelfCheckFailed, match="layer 0, key differs"):
        load_engine(folder, key_state="raw")


def test_swapped_lanes_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotate(x, replace(rotation, lane_order=LaneOrder.ADJACENT))

    monkeypatch.setattr(attention, "rotate", swap)
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        load_engine(folder)


def test_positions_that_are_off_by_one_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    angles = batch._angles
    monkeypatch.setattr(batch, "_angles", lambda group, positions_T: angles(group, positions_T + 1))
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        load_engine(folder)


def test_slot_numbers_taken_for_positions_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    angles = batch._angles
    monkeypatch.setattr(
        batch, "_angles", lambda group, positions_T: angles(group, torch.arange(positions_T.numel()))
    )
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        load_engine(folder)


def test_the_self_check_counts_no_work_and_leaves_no_block_held(folder: Path) -> None:
    engine = load_engine(folder, block_size=1, blocks=2)
    assert engine.counters().forward_steps == 0
    assert engine.pool.counts().free == 2
