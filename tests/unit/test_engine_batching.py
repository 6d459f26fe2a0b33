"""Many sequences at once: the same tokens as alone, in fewer forwards, and every block comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.engine.engine import Engine
from kvpact.engine.requests import ChunkComputed, SequenceFailed, TokenComputed
from kvpact.errors import BadRequest, KvpactError
from kvpact.types import FinishReason, Sampling
from tests.fakes import load_engine, make_request, make_tiny_model, prompt_of, run_by_hand, submit

LENGTHS = (1, 5, 16, 17, 33, 40, 64, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope="llama3")


def all_blocks_are_free(engine: Engine) -> bool:
    return engine.pool.counts().free == engine.pool.total and engine.load_now() == (0, 0)


def tokens_alone(folder: Path, length: int, count: int) -> list[int]:
    (alone,) = run_by_hand(load_engine(folder), make_request(prompt_of(length), count))
    return alone.token_ids


def test_eight_requests_at_once_equal_serial_ones_in_less_than_half_the_forwards(folder: Path) -> None:
    serial, together = load_engine(folder), load_engine(folder)
    alone = [run_by_hand(serial, make_request(prompt_of(length), 24))[0] for length in LENGTHS]
    batch = run_by_hand(together, *(make_request(prompt_of(length), 24) for length in LENGTHS))
    for one, many in zip(alone, batch, strict=True):
        assert one.token_ids == many.token_ids
        assert (one.logits - many.logits).abs().max() < 1e-4
    assert together.counters().forward_steps < serial.counters().forward_steps / 2
    assert together.counters().computed_output_tokens == serial.counters().computed_output_tokens
    assert all_blocks_are_free(together)


def test_a_prompt_that_arrives_late_joins_running_decodes(folder: Path) -> None:
    engine = load_engine(folder, prefill_chunk_tokens=16)
    early = submit(engine, make_request(prompt_of(17), 20))
    for _ in range(6):
        engine.step()
    (late,) = run_by_hand(engine, make_request(prompt_of(50), 12))
    assert early.token_ids == tokens_alone(folder, 17, 20)
    assert late.token_ids == tokens_alone(folder, 50, 12)


@pytest.mark.parametrize("key_state", ["raw", "rotated"])
def test_a_preempted_sequence_goes_on_exactly(folder: Path, key_state: str) -> None:
    engine = load_engine(folder, blocks=7, key_state=key_state)
    batch = run_by_hand(engine, *(make_request(prompt_of(length), 30) for length in (30, 31, 33)))
    for length, collected in zip((30, 31, 33), batch, strict=True):
        assert collected.token_ids == tokens_alone(folder, length, 30)
    assert engine.counters().computed_prompt_tokens > 30 + 31 + 33, "nothing was preempted"
    assert all_blocks_are_free(engine)


def test_a_sequence_goes_on_from_blocks_that_were_filled_by_someone_else(folder: Path) -> None:
    writer, reader = load_engine(folder, axis_order="HND"), load_engine(folder, axis_order="HND")
    first = submit(writer, make_request(prompt_of(32), 10, stop_after_first=True, hold_blocks=True))
    while writer.step():
        pass
    (chunk,) = [event for event in first.events if isinstance(event, ChunkComputed)]
    assert chunk.computed_tokens == 32
    blocks = reader.pool.allocate(len(chunk.blocks), "sequence")
    for layer in range(2):
        for theirs, ours in zip(writer.cache._keys[layer], reader.cache._keys[layer], strict=True):
            assert theirs.shape == ours.shape
        reader.cache._keys[layer][list(blocks)] = writer.cache._keys[layer][list(chunk.blocks)]
        reader.cache._values[layer][list(blocks)] = writer.cache._values[layer][list(chunk.blocks)]
    (rest,) = run_by_hand(
        reader,
        make_request(
            (*prompt_of(32), *first.token_ids), 10, output_tokens_so_far=1, blocks=blocks, computed_tokens=32
        ),
    )
    assert first.token_ids + rest.token_ids == tokens_alone(folder, 32, 10)
    assert reader.counters().computed_output_tokens == 9
    assert reader.counters().computed_prompt_tokens == 0
    assert all_blocks_are_free(reader)
    assert writer.pool.counts().free == writer.pool.total - 2
    writer.release(first.sequence_id)
    writer.release(first.sequence_id)
    assert all_blocks_are_free(writer)


def test_chunks_are_told_with_their_blocks_before_the_first_token(folder: Path) -> None:
    engine = load_engine(folder, prefill_chunk_tokens=16)
    (held,) = run_by_hand(engine, make_request(prompt_of(40), 5, stop_after_first=True, hold_blocks=True))
    chunks = [event for event in held.events if isinstance(event, ChunkComputed)]
    assert [chunk.computed_tokens for chunk in chunks] == [16, 32, 40]
    assert {len(chunk.blocks) for chunk in chunks} == {3}
    assert isinstance(held.events[-1], TokenComputed)
    assert held.events[-1].finish_reason is None
    engine.close()
    assert all_blocks_are_free(engine)


def test_cancelling_at_any_state_returns_every_block_without_a_further_event(folder: Path) -> None:
    for steps in range(8):
        engine = load_engine(folder, prefill_chunk_tokens=8, max_sequences=2)
        batch = [submit(engine, make_request(prompt_of(20), 30)) for _ in range(3)]
        for _ in range(steps):
            engine.step()
        seen = [len(collected.events) for collected in batch]
        for collected in batch:
            engine.cancel(collected.sequence_id)
            engine.cancel(collected.sequence_id)
        assert not engine.step()
        assert [len(collected.events) for collected in batch] == seen
        assert all_blocks_are_free(engine)


def test_cancelling_in_a_running_forward_frees_the_blocks_when_it_is_done(folder: Path) -> None:
    engine = load_engine(folder)
    other = submit(engine, make_request(prompt_of(9), 3))
    victim = submit(engine, make_request(prompt_of(20), 30))
    original = engine._runner.run

    def cancel_meanwhile(batch: object) -> object:
        logits = original(batch)  # type: ignore[arg-type]
        engine.cancel(victim.sequence_id)
        assert engine.pool.counts().free < engine.pool.total
        return logits

    engine._runner.run = cancel_meanwhile  # type: ignore[method-assign, assignment]
    while engine.step():
        pass
    assert victim.events == []
    assert other.token_ids == tokens_alone(folder, 9, 3)
    assert all_blocks_are_free(engine)


def test_a_failing_forward_fails_its_sequences_and_the_engine_goes_on(folder: Path) -> None:
    engine = load_engine(folder)
    original = engine._runner.run

    def fail(batch: object) -> object:
        engine._runner.run = original  # type: ignore[method-assign]
        raise RuntimeError("no memory")

    engine._runner.run = fail  # type: ignore[method-assign, assignment]
    (first,) = run_by_hand(engine, make_request(prompt_of(9), 3))
    (event,) = first.events
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, KvpactError)
    (second,) = run_by_hand(engine, make_request(prompt_of(9), 3))
    assert second.token_ids == tokens_alone(folder, 9, 3)
    assert all_blocks_are_free(engine)


def test_a_listener_that_raises_loses_its_own_sequence_only(folder: Path) -> None:
    engine = load_engine(folder)

    def on_event(event: object) -> None:
        raise ValueError("no one listens")

    engine.submit(make_request(prompt_of(9), 30), on_event)
    (other,) = run_by_hand(engine, make_request(prompt_of(9), 3))
    assert other.token_ids == tokens_alone(folder, 9, 3)
    assert all_blocks_are_free(engine)


def test_a_stop_token_is_given_out_as_the_last_one(folder: Path) -> None:
    tokens = tokens_alone(folder, 9, 12)
    stop = tokens[6]
    expected = tokens[: tokens.index(stop) + 1]
    sampling = Sampling(max_output_tokens=12, stop_token_ids=frozenset({stop}))
    (stopped,) = run_by_hand(load_engine(folder), make_request(prompt_of(9), sampling=sampling))
    assert stopped.token_ids == expected
    assert stopped.finish_reason is FinishReason.STOP


def test_ignore_eos_leaves_stop_token_ids_in_force_but_not_the_models_own(folder: Path) -> None:
    tokens = tokens_alone(folder, 9, 12)
    engine = load_engine(folder)
    engine.eos_token_ids = frozenset({tokens[2]})
    (kept,) = run_by_hand(engine, make_request(prompt_of(9), 12))
    assert kept.token_ids == tokens
    assert kept.finish_reason is FinishReason.LENGTH
    (ended,) = run_by_hand(engine, make_request(prompt_of(9), sampling=Sampling(max_output_tokens=12)))
    assert ended.token_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert ended.finish_reason is FinishReason.STOP


def test_output_ends_with_the_context(folder: Path) -> None:
    engine = load_engine(folder, context=24)
    (cut,) = run_by_hand(engine, make_request(prompt_of(20), 30))
    assert cut.token_ids == tokens_alone(folder, 20, 4)
    assert cut.finish_reason is FinishReason.LENGTH


def test_one_token_asked_gives_one_token(folder: Path) -> None:
    (one,) = run_by_hand(load_engine(folder), make_request(prompt_of(20), 1))
    assert len(one.token_ids) == 1
    assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "found"),
    [
        ((), 4, "empty"),
        ((5, 264), 4, "264"),
        ((-1,), 4, "-1"),
        ((5,), 0, "max_tokens 0"),
        (prompt_of(64), 4, "context of 64"),
        (prompt_of(20), 40, "3 blocks of 16"),
    ],
)
def test_input_that_can_not_be_served_is_refused_at_submit(
    folder: Path, tokens: tuple[int, ...], max_tokens: int, found: str
) -> None:
    engine = load_engine(folder, context=64, blocks=3)
    with pytest.raises(BadRequest, match=found):
        submit(engine, make_request(tokens, max_tokens))
    assert all_blocks_are_free(engine)
    (after,) = run_by_hand(engine, make_request(prompt_of(9), 3))
    assert after.token_ids == tokens_alone(folder, 9, 3)
