"""Which tokens of which sequences the next forward computes. Holds blocks and lists, never computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpact.engine.requests import SequenceRequest
from kvpact.engine.witness_tap import WitnessTap
from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import BlockId, FinishReason, SequenceId

HOLDER = "sequence"


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """State of one sequence. Tokens [0, computed) have their keys and values in `blocks`."""

    sequence_id: SequenceId
    request: SequenceRequest
    stop_token_ids: frozenset[int]
    tokens: list[int]
    prompt_tokens: int
    computed: int
    blocks: list[BlockId]
    tap: WitnessTap | None = None
    in_flight: bool = False
    cancelled: bool = False

    def positions(self, end: int) -> Sequence[int]:
        """Positions of tokens [0, end)."""
        given = self.request.positions
        if given is None:
            return range(end)
        return (*given[:end], *range(given[-1] + 1, given[-1] + 1 + end - len(given)))

    @property
    def next_position(self) -> int:
        """Position of the token behind the last one."""
        given = self.request.positions
        return len(self.tokens) if given is None else given[-1] + 1 + len(self.tokens) - len(given)

    @property
    def decodes(self) -> bool:
        """Whether only the newest output token is left to compute."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens [start, end) of one sequence, to be computed in one forward."""

    sequence: Running
    start: int
    end: int
    decodes: bool
    samples: bool
    """Whether the last row gives a new token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of some rows. `token_id` is None for a chunk that isn't a prompt's last."""

    rows: Rows
    token_id: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """Continuous batching: decode rows first, then prefill chunks. Its owner calls it under one lock."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        context_tokens: int,
        max_sequences: int,
        prefill_chunk_tokens: int,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self._chunk_tokens = prefill_chunk_tokens
        self._sequences: dict[SequenceId, Running] = {}
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        """In order of arrival, oldest first."""

    def add(self, sequence_id: SequenceId, request: SequenceRequest, stop_token_ids: frozenset[int]) -> None:
        """Queues a sequence and takes over its blocks."""
        self._pool.move(request.blocks, HOLDER)
        sequence = Running(
            sequence_id=sequence_id,
            request=request,
            stop_token_ids=stop_token_ids,
            tokens=list(request.token_ids),
            prompt_tokens=len(request.token_ids) - request.output_tokens_so_far,
            computed=request.computed_tokens,
            blocks=list(request.blocks),
            tap=WitnessTap(request.witness_places) if request.witness_places else None,
        )
        self._sequences[sequence_id] = sequence
        self._waiting.append(sequence)

    def drop(self, sequence_id: SequenceId) -> None:
        """Ends a sequence at any state, in a running forward once it is done, and frees its blocks."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.in_flight:
            sequence.cancelled = True
            return
        self._end(sequence)

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Every sequence that isn't ended, those with held blocks included."""
        return tuple(self._sequences)

    def alive(self, sequence_id: SequenceId) -> bool:
        """Whether the sequence is known and not cancelled."""
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and not sequence.cancelled

    def load_now(self) -> tuple[int, int]:
        """Sequences that compute, and sequences that wait."""
        return len(self._running), len(self._waiting)

    def next_batch(self) -> tuple[Rows, ...]:
        """Rows of the next forward; empty if nothing can run now."""
        self._admit()
        self._make_room()
        batch = self._decode_rows() + self._prefill_rows()
        for rows in batch:
            rows.sequence.in_flight = True
        return batch

    def advance(self, batch: Sequence[Rows], tokens: Mapping[SequenceId, int]) -> list[Outcome]:
        """Takes in a finished forward's tokens and ends what is done, blocks freed; skips the cancelled."""
        outcomes = []
        for rows in batch:
            sequence = rows.sequence
            sequence.in_flight = False
            if sequence.cancelled:
                self._end(sequence)
                continue
            sequence.computed = rows.end
            token_id = tokens[sequence.sequence_id] if rows.samples else None
            outcome = Outcome(
                rows=rows, token_id=token_id, finish_reason=self._take_token(sequence, token_id)
            )
            outcomes.append(outcome)
        return outcomes

    def abort(self, batch: Sequence[Rows]) -> list[SequenceId]:
        """Ends every sequence of a forward that failed; gives those that weren't cancelled."""
        failed = [rows.sequence.sequence_id for rows in batch if not rows.sequence.cancelled]
        for rows in batch:
            self._end(rows.sequence)
        return failed

    def _take_token(self, sequence: Running, token_id: int | None) -> FinishReason | None:
        if token_id is None:
            return None
        sequence.tokens.append(token_id)
        reason = self._finish_reason(sequence)
        if sequence.request.hold_blocks:
            self._running.remove(sequence)
        elif reason is not None or sequence.request.stop_after_first:
            self._end(sequence)
        return reason

    def _finish_reason(self, sequence: Running) -> FinishReason | None:
        outputs = len(sequence.tokens) - sequence.prompt_tokens
        if sequence.tokens[-1] in sequence.stop_token_ids:
            return FinishReason.STOP
        if (
            outputs >= sequence.request.sampling.max_output_tokens
            or sequence.next_position >= self._context_tokens
        ):
            return FinishReason.LENGTH
        return None

    def _end(self, sequence: Running) -> None:
        if self._sequences.pop(sequence.sequence_id, None) is None:
            return
        self._running = [other for other in self._running if other is not sequence]
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self._pool.free(blocks)

    def _admit(self) -> None:
        """Lets waiting sequences in, in order; one that brings its blocks may pass one that lacks room."""
        blocked = False
        for sequence in tuple(self._waiting):
            if len(self._running) >= self._max_sequences:
                return
            if not sequence.blocks:
                blocked = blocked or not self._give_blocks(sequence)
                if blocked:
                    continue
            self._waiting.remove(sequence)
            self._insert_by_age(sequence)

    def _give_blocks(self, sequence: Running) -> bool:
        needed = self._blocks_for(len(sequence.tokens))
        watermark = len(self._running)
        if self._pool.counts().free < needed + watermark:
            return False
        return self._allocate(sequence, needed)

    def _allocate(self, sequence: Running, count: int) -> bool:
        try:
            sequence.blocks.extend(self._pool.allocate(count, HOLDER))
        except Exhausted:
            return False
        return True

    def _insert_by_age(self, sequence: Running) -> None:
        self._running.append(sequence)
        self._running.sort(key=lambda running: running.sequence_id)

    def _make_room(self) -> None:
        """Gives each running sequence blocks for all its tokens, the oldest first; the youngest gives way."""
        for sequence in tuple(self._running):
            missing = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            while missing > 0 and sequence in self._running and not self._allocate(sequence, missing):
                age = self._running.index(sequence)
                self._preempt([other for other in self._running[age:] if _may_give_way(other)][-1])

    def _decode_rows(self) -> tuple[Rows, ...]:
        batch = []
        for sequence in self._running:
            if sequence.decodes:
                end = len(sequence.tokens)
                batch.append(Rows(sequence=sequence, start=end - 1, end=end, decodes=True, samples=True))
        return tuple(batch)

    def _preempt(self, sequence: Running) -> None:
        """Frees the blocks; prompt and output are computed again when there is room."""
        self._running.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        sequence.computed = 0
        self._waiting.appendleft(sequence)
        self._pool.free(blocks)

    def _prefill_rows(self) -> tuple[Rows, ...]:
        batch = []
        budget = self._chunk_tokens
        for sequence in self._running:
            if budget == 0:
                break
            if sequence.decodes:
                continue
            end = min(len(sequence.tokens), sequence.computed + budget)
            budget -= end - sequence.computed
            batch.append(
                Rows(
                    sequence=sequence,
                    start=sequence.computed,
                    end=end,
                    decodes=False,
                    samples=end == len(sequence.tokens),
                )
            )
        return tuple(batch)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _may_give_way(sequence: Running) -> bool:
    return not (sequence.request.hold_blocks or sequence.request.keep_computed)
