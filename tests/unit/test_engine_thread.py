"""The engine's own thread: it sleeps when idle, wakes for work and for room, and ends when closed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpact.engine.engine import Engine
from kvpact.engine.requests import EngineEvent, SequenceFailed, TokenComputed
from kvpact.engine.stream import stream
from kvpact.errors import BadRequest, Unavailable
from kvpact.types import FinishReason, Sampling
from tests.fakes import VOCAB_SIZE, load_engine, make_request, make_tiny_model, prompt_of, run_by_hand

PATIENCE_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = load_engine(folder)
    engine.start()
    yield engine
    engine.close()


def next_token(events: queue.Queue[EngineEvent]) -> TokenComputed:
    event = events.get(timeout=PATIENCE_S)
    assert isinstance(event, TokenComputed)
    return event


def test_a_started_engine_computes_what_one_driven_by_hand_does(folder: Path, engine: Engine) -> None:
    events: queue.Queue[EngineEvent] = queue.Queue()
    engine.submit(make_request(prompt_of(20), 6), events.put)
    tokens = [next_token(events) for _ in range(6)]
    (by_hand,) = run_by_hand(load_engine(folder), make_request(prompt_of(20), 6))
    assert [event.token_id for event in tokens] == by_hand.token_ids
    assert tokens[-1].finish_reason is FinishReason.LENGTH
    assert engine.pool.counts().free == engine.pool.total


def test_an_idle_engine_takes_no_step(engine: Engine) -> None:
    taken = threading.Event()
    original = engine.step

    def step() -> bool:
        taken.set()
        return original()

    engine.step = step  # type: ignore[method-assign]
    assert not taken.wait(0.05)
    events: queue.Queue[EngineEvent] = queue.Queue()
    engine.submit(make_request(prompt_of(5), 1), events.put)
    next_token(events)
    assert taken.is_set()


def test_a_sequence_that_waits_for_room_starts_when_someone_else_frees_blocks(engine: Engine) -> None:
    reserved = engine.pool.allocate(engine.pool.total, "reservation")
    events: queue.Queue[EngineEvent] = queue.Queue()
    engine.submit(make_request(prompt_of(20), 1), events.put)
    with pytest.raises(queue.Empty):
        events.get(timeout=0.05)
    engine.pool.free(reserved, "reservation")
    next_token(events)


def test_close_ends_running_and_waiting_sequences_and_frees_their_blocks(engine: Engine) -> None:
    events: queue.Queue[EngineEvent] = queue.Queue()
    for _ in range(3):
        engine.submit(make_request(prompt_of(20), 4000), events.put)
    next_token(events)
    engine.close()
    engine.close()
    assert engine.pool.counts().free == engine.pool.total
    with pytest.raises(Unavailable):
        engine.submit(make_request(prompt_of(5), 1), events.put)


async def test_a_stream_gives_every_event_and_ends(folder: Path, engine: Engine) -> None:
    tokens = [event async for event in stream(engine, make_request(prompt_of(20), 6))]
    assert [type(event) for event in tokens] == [TokenComputed] * 6


async def test_leaving_a_stream_early_cancels_the_sequence(engine: Engine) -> None:
    freed = threading.Event()
    events = stream(engine, make_request(prompt_of(20), 4000))
    await anext(events)
    engine.pool.on_free(freed.set)
    await events.aclose()
    assert freed.wait(PATIENCE_S)
    assert engine.pool.counts().free == engine.pool.total


async def test_a_stream_of_a_request_that_is_refused_raises(engine: Engine) -> None:
    with pytest.raises(BadRequest):
        await anext(stream(engine, make_request((), 1)))


async def test_a_stream_that_ended_leaves_held_blocks_to_release(engine: Engine) -> None:
    request = make_request(prompt_of(20), 5, stop_after_first=True, hold_blocks=True)
    events = [event async for event in stream(engine, request)]
    assert engine.pool.counts().free == engine.pool.total - 2
    engine.release(events[0].sequence_id)
    assert engine.pool.counts().free == engine.pool.total


def test_a_sequence_whose_logits_are_no_numbers_fails_alone(folder: Path) -> None:
    engine = load_engine(folder)
    events: dict[str, list[EngineEvent]] = {"spoiled": [], "sound": []}
    spoiled = engine.submit(make_request(prompt_of(9), 3), events["spoiled"].append)
    engine.submit(make_request(prompt_of(12), 3), events["sound"].append)
    run = engine._runner.run

    def with_a_nan(batch: object) -> object:
        logits = run(batch)  # type: ignore[arg-type]
        return {key: row * float("nan") if key == spoiled else row for key, row in logits.items()}

    engine._runner.run = with_a_nan  # type: ignore[method-assign,assignment]
    while engine.step():
        continue
    assert [type(event) for event in events["spoiled"]] == [SequenceFailed]
    assert [type(event) for event in events["sound"]] == [TokenComputed] * 3
    assert engine.pool.counts().free == engine.pool.total
    engine.close()


@pytest.mark.filterwarnings("error")
def test_an_engine_whose_thread_ended_says_so_and_leaves_nobody_waiting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(folder)
    events: queue.Queue[EngineEvent] = queue.Queue()
    engine.submit(make_request(prompt_of(9), 30), events.put)

    def broken() -> bool:
        raise RuntimeError("a defect of the scheduler")

    engine.step = broken  # type: ignore[method-assign]
    engine.start()
    failed = events.get(timeout=PATIENCE_S)
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, Unavailable)
    with pytest.raises(Unavailable):
        engine.submit(make_request(prompt_of(9), 3), events.put)
    engine.close()
    assert not engine.alive()
    assert engine.pool.counts().free == engine.pool.total
    assert "a defect of the scheduler" in caplog.text


def test_an_ignored_end_token_stays_ignored_beside_named_stop_tokens(folder: Path) -> None:
    engine = load_engine(folder)
    (free,) = run_by_hand(engine, make_request(prompt_of(20), 12))
    end = free.token_ids[3]
    engine.eos_token_ids = frozenset({end})
    never = next(token for token in range(200) if token not in free.token_ids)
    sampling = Sampling(max_output_tokens=12, ignore_eos=True, stop_token_ids=frozenset({never}))
    (found,) = run_by_hand(engine, make_request(prompt_of(20), 12, sampling=sampling))
    assert found.token_ids == free.token_ids
    (stopped,) = run_by_hand(engine, make_request(prompt_of(20), 12, sampling=Sampling(max_output_tokens=12)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    engine.close()


def test_ids_that_only_pad_the_embedding_are_neither_taken_nor_picked(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "padded", vocab_size=VOCAB_SIZE + 5)
    weights = load_file(folder / "model.safetensors")
    loud = weights["lm_head.weight"]
    loud[VOCAB_SIZE:] = loud[:5] * 100
    loud[VOCAB_SIZE : VOCAB_SIZE + 2] *= -1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = load_engine(folder)
    (found,) = run_by_hand(engine, make_request(prompt_of(20), 16))
    assert max(found.token_ids) < VOCAB_SIZE
    assert any(int(row.argmax()) >= VOCAB_SIZE for row in found.logits), "the padding is loud enough to win"
    with pytest.raises(BadRequest, match=f"{VOCAB_SIZE} is outside"):
        engine.submit(make_request((VOCAB_SIZE,), 2), print)
    engine.close()


def test_a_strangers_numbers_in_the_first_block_reach_no_shorter_sequence(folder: Path) -> None:
    engine = load_engine(folder)
    foreign = engine.pool.allocate(1, "stranger")
    nothing = torch.full((16, 2, 16), torch.nan)
    for layer in range(2):
        engine.cache.write(layer, torch.tensor(foreign), 0, nothing, nothing)
    prompts = (prompt_of(9), prompt_of(11))
    together = run_by_hand(engine, *(make_request(prompt, 6) for prompt in prompts))
    alone = [run_by_hand(load_engine(folder), make_request(prompt, 6))[0] for prompt in prompts]
    assert foreign == (0,)
    assert [run.token_ids for run in together] == [run.token_ids for run in alone]
    engine.close()
