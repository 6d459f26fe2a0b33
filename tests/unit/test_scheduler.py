"""Who computes what next: decode rows first, prompts in chunks, the youngest gives way."""

from __future__ import annotations

from kvpact.engine.requests import SequenceRequest
from kvpact.engine.scheduler import Outcome, Rows, Scheduler
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import FinishReason, Sampling, SequenceId

TOKEN = 7


class Bench:
    """A scheduler whose forwards give TOKEN everywhere."""

    def __init__(self, *, blocks: int = 64, sequences: int = 8, chunk: int = 8, context: int = 1000) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            pool=self.pool,
            block_size=4,
            context_tokens=context,
            max_sequences=sequences,
            prefill_chunk_tokens=chunk,
        )
        self.count = 0

    def add(self, prompt: int, tokens: int = 5, **facts: object) -> SequenceId:
        self.count += 1
        request = SequenceRequest(
            **{
                "token_ids": (1,) * prompt,
                "sampling": Sampling(max_output_tokens=tokens),
                "table_length": 100,
            }
            | facts  # type: ignore[arg-type]
        )
        self.scheduler.add(SequenceId(self.count), request, request.sampling.stop_token_ids)
        return SequenceId(self.count)

    def step(self) -> list[Outcome]:
        batch = self.scheduler.next_batch()
        return self.scheduler.advance(
            batch, {rows.sequence.sequence_id: TOKEN for rows in batch if rows.samples}
        )

    def plan(self) -> list[tuple[int, int, int]]:
        """(sequence, start, end) of the next batch, which then runs."""
        batch = self.scheduler.next_batch()
        self.scheduler.advance(batch, {rows.sequence.sequence_id: TOKEN for rows in batch if rows.samples})
        return [shown(rows) for rows in batch]


def shown(rows: Rows) -> tuple[int, int, int]:
    return rows.sequence.sequence_id, rows.start, rows.end


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    bench = Bench()
    bench.add(20, 3)
    assert [bench.plan() for _ in range(6)] == [
        [(1, 0, 8)],
        [(1, 8, 16)],
        [(1, 16, 20)],
        [(1, 20, 21)],
        [(1, 21, 22)],
        [],
    ]
    assert bench.pool.counts().free == 64


def test_decode_rows_come_first_and_don_t_eat_the_chunk() -> None:
    bench = Bench()
    bench.add(3)
    bench.plan()
    bench.add(20)
    assert bench.plan() == [(1, 3, 4), (2, 0, 8)]
    assert bench.plan() == [(1, 4, 5), (2, 8, 16)]


def test_a_chunk_is_shared_by_prompts_in_order_of_arrival() -> None:
    bench = Bench()
    bench.add(5)
    bench.add(5)
    assert bench.plan() == [(1, 0, 5), (2, 0, 3)]
    assert bench.plan() == [(1, 5, 6), (2, 3, 5)]


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(sequences=1)
    bench.add(3, 2)
    bench.add(3, 2)
    assert bench.plan() == [(1, 0, 3)]
    assert bench.scheduler.load_now() == (1, 1)
    assert bench.plan() == [(1, 3, 4)]
    assert bench.plan() == [(2, 0, 3)]


def test_a_prompt_waits_until_its_blocks_are_free_and_later_ones_wait_behind_it() -> None:
    bench = Bench(blocks=4)
    bench.add(8, 3)
    bench.plan()
    bench.add(12)
    bench.add(1)
    assert bench.plan() == [(1, 8, 9)]
    assert bench.scheduler.load_now() == (1, 2)


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    bench = Bench(blocks=6)
    bench.add(8, 9)
    bench.add(8, 9)
    plans = [bench.plan() for _ in range(16)]
    assert plans[:2] == [[(1, 0, 8)], [(1, 8, 9), (2, 0, 8)]]
    again = [part for plan in plans[2:] for part in plan if part[0] == 2]
    assert again[:5] == [(2, 8, 9), (2, 9, 10), (2, 10, 11), (2, 0, 8), (2, 8, 12)]
    assert bench.pool.counts().free == 6
    assert bench.scheduler.load_now() == (0, 0)


def test_a_sequence_preempts_itself_when_others_hold_the_pool() -> None:
    bench = Bench(blocks=4)
    bench.add(8, 9)
    bench.plan()
    others = bench.pool.allocate(2, "reservation")
    assert bench.plan() == []
    assert bench.scheduler.load_now() == (0, 1)
    bench.pool.free(others, "reservation")
    assert bench.plan() == [(1, 0, 8)]


def test_a_sequence_with_blocks_of_its_own_passes_a_prompt_that_lacks_room() -> None:
    bench = Bench(blocks=4)
    landed = bench.pool.allocate(2, "sequence")
    bench.add(12)
    bench.add(9, 3, blocks=landed, computed_tokens=8, output_tokens_so_far=1)
    assert bench.plan() == [(2, 8, 9)]
    assert bench.pool.held() == {"sequence": 3}


def test_a_sequence_that_comes_with_several_tokens_to_compute_gets_blocks_for_them() -> None:
    bench = Bench(blocks=4)
    landed = bench.pool.allocate(2, "sequence")
    bench.add(14, 9, blocks=landed, computed_tokens=8, output_tokens_so_far=6)
    assert bench.plan() == [(1, 8, 14)]
    assert bench.pool.held() == {"sequence": 4}


def test_held_blocks_stay_until_dropped_and_take_no_place_among_the_running() -> None:
    bench = Bench(sequences=1)
    held = bench.add(6, 5, stop_after_first=True, hold_blocks=True)
    (outcome,) = bench.step()
    assert outcome.finish_reason is None
    assert bench.scheduler.load_now() == (0, 0)
    assert bench.pool.counts().free == 62
    bench.add(3)
    assert bench.plan() == [(2, 0, 3)]
    bench.scheduler.drop(held)
    bench.scheduler.drop(held)
    assert bench.pool.counts().free == 63


def test_the_last_token_says_why_it_is_the_last() -> None:
    stopped, full, short = Bench(), Bench(), Bench(context=4)
    stopped.add(3, 1, sampling=Sampling(max_output_tokens=1, stop_token_ids=frozenset({TOKEN})))
    full.add(3, 1)
    short.add(3, 100)
    assert [bench.step()[0].finish_reason for bench in (stopped, full, short)] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    assert all(bench.pool.counts().free == 64 for bench in (stopped, full, short))


def test_output_tokens_that_came_before_count_towards_the_limit() -> None:
    bench = Bench()
    blocks = bench.pool.allocate(2, "sequence")
    bench.add(9, 3, blocks=blocks, computed_tokens=8, output_tokens_so_far=1)
    outcomes = [bench.step()[0] for _ in range(2)]
    assert [outcome.finish_reason for outcome in outcomes] == [None, FinishReason.LENGTH]
    assert all(outcome.rows.decodes for outcome in outcomes)


def test_a_sequence_dropped_in_flight_gives_no_outcome_and_frees_its_blocks_after() -> None:
    bench = Bench()
    dropped = bench.add(3)
    batch = bench.scheduler.next_batch()
    bench.scheduler.drop(dropped)
    assert not bench.scheduler.alive(dropped)
    assert bench.pool.counts().free == 63
    assert bench.scheduler.advance(batch, {dropped: TOKEN}) == []
    assert bench.pool.counts().free == 64


def test_what_must_not_be_computed_again_never_gives_way() -> None:
    bench = Bench(blocks=3)
    old = bench.add(4, 20)
    bench.step()
    kept = bench.add(
        4,
        1,
        blocks=bench.pool.allocate(1, "sequence"),
        computed_tokens=3,
        keep_computed=True,
        stop_after_first=True,
    )
    bench.scheduler.next_batch()
    running = bench.scheduler._running
    assert [sequence.sequence_id for sequence in running] == [old, kept]
    running[0].tokens.extend([TOKEN] * 8)
    bench.scheduler._make_room()
    assert [sequence.sequence_id for sequence in bench.scheduler._running] == [kept]
