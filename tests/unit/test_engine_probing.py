"""What probes and witnesses ask of the engine: explicit positions, rows out of attention, uncounted work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpact.contract.rotation import rotate, rotation_at
from kvpact.contract.witness_places import Place
from kvpact.engine.engine import Engine
from kvpact.engine.requests import ChunkComputed, EngineCounters, TokenComputed, WitnessesComputed
from kvpact.errors import BadRequest
from tests.fakes import load_engine, make_request, make_tiny_model, prompt_of, run_by_hand, submit

POSITIONS = (*range(9), 40, 41, 900, *range(4060, 4065))
TOKENS = prompt_of(len(POSITIONS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(
    params=[{}, {"key_state": "raw"}, {"prefill_chunk_tokens": 5}], ids=["rotated", "raw", "chunked"]
)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = load_engine(folder, blocks=8, **request.param)
    yield made
    made.close()


def own_logits(engine: Engine, tokens: tuple[int, ...], positions: tuple[int, ...]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the model's own forward."""
    return engine.model.own_forward(list(tokens), list(positions))


def test_tokens_at_positions_with_gaps_equal_the_models_own_forward(engine: Engine) -> None:
    (run,) = run_by_hand(engine, make_request(TOKENS, 4, positions=POSITIONS))
    tokens = (*TOKENS, *run.token_ids[:-1])
    positions = (*POSITIONS, *range(4065, 4068))
    expected = own_logits(engine, tokens, positions)[len(TOKENS) - 1 :]
    assert float((run.logits - expected).abs().max()) <= 1e-4
    contiguous = own_logits(engine, tokens, tuple(range(len(tokens))))[len(TOKENS) - 1 :]
    assert float((run.logits - contiguous).abs().max()) > 1e-2


def test_a_sequence_with_gaps_ends_where_the_context_does(engine: Engine) -> None:
    (run,) = run_by_hand(engine, make_request(TOKENS[:3], 100, positions=(0, 1, 4090)))
    assert len(run.token_ids) == 4096 - 4091
    with pytest.raises(BadRequest, match="4096 tokens leave no room"):
        submit(engine, make_request(TOKENS[:3], positions=(0, 1, 4095)))


@pytest.mark.parametrize("positions", [(0, 1), (0, 2, 2), (3, 2, 4), (-1, 0, 1)])
def test_positions_that_are_no_order_of_tokens_are_refused(
    engine: Engine, positions: tuple[int, ...]
) -> None:
    with pytest.raises(BadRequest, match="positions"):
        submit(engine, make_request(TOKENS[:3], positions=positions))


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["without gaps", "with gaps"])
def test_rows_come_out_raw_and_as_attended_once_before_the_first_token(
    engine: Engine, positions: tuple[int, ...] | None
) -> None:
    places = (Place(layer=0, token=0), Place(layer=0, token=7), Place(layer=1, token=16))
    request = make_request(TOKENS, 3, positions=positions, witness_places=places)
    (run,) = run_by_hand(engine, request)
    told = [event for event in run.events if isinstance(event, WitnessesComputed)]
    assert len(told) == 1
    assert run.events.index(told[0]) < next(
        i for i, event in enumerate(run.events) if isinstance(event, TokenComputed)
    )
    assert tuple(row.place for row in told[0].rows) == places
    rotary = engine.contract.layer_groups[0].rotary
    for row in told[0].rows:
        position = row.place.token if positions is None else positions[row.place.token]
        rotation = rotation_at(rotary, rotary.tables[0], torch.tensor([position]))
        assert torch.equal(rotate(row.raw_key_HD[None], rotation)[0], row.attended_key_HD)
        assert row.value_HD.shape == (2, 16)


def test_rows_are_what_lies_in_the_cache(engine: Engine) -> None:
    request = make_request(
        TOKENS, 3, witness_places=(Place(layer=1, token=12),), stop_after_first=True, hold_blocks=True
    )
    run = submit(engine, request)
    while engine.step():
        pass
    (told,) = (event for event in run.events if isinstance(event, WitnessesComputed))
    blocks = [event for event in run.events if isinstance(event, ChunkComputed)][-1].blocks
    rows = engine.cache.rows(engine.cache.slots(blocks, 12, 13), 2)
    raw = engine.contract.layer_groups[0].rotary.key_state == "raw"
    key = told.rows[0].raw_key_HD if raw else told.rows[0].attended_key_HD
    assert torch.equal(engine.cache.keys_at(1, rows)[:, 0], key)
    assert torch.equal(engine.cache.values_at(1, rows)[:, 0], told.rows[0].value_HD)
    assert run.sequence_id is not None
    engine.release(run.sequence_id)


def test_a_request_that_asks_for_no_rows_gets_none(engine: Engine) -> None:
    (run,) = run_by_hand(engine, make_request(TOKENS, 2))
    assert not any(isinstance(event, WitnessesComputed) for event in run.events)


def test_uncounted_work_counts_nowhere_and_leaves_others_counted(engine: Engine) -> None:
    run_by_hand(engine, make_request(TOKENS, 3, counted=False))
    assert engine.counters() == EngineCounters()
    run_by_hand(engine, make_request(TOKENS, 3, counted=False), make_request(TOKENS[:4], 3))
    counted = engine.counters()
    assert counted.computed_prompt_tokens == 4
    assert counted.computed_output_tokens == 2
    assert 3 <= counted.forward_steps <= 8
