"""Which tokens of which sequences the next forward computes. Holds blocks and lists, never computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvpact.contract.witness_places import Place
from kvpact.engine.prefix import PrefixCache
from kvpact.engine.requests import SequenceRequest
from kvpact.engine.running import Outcome, Rows, Running
from kvpact.engine.witness_tap import WitnessTap
from kvpact.errors import Exhausted
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock
from kvpact.types import FinishReason, SequenceId

HOLDER = "sequence"


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
        prefixes: PrefixCache | None = None,
    ) -> None:
        """`prefixes` None: every sequence computes all its tokens."""
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self._chunk_tokens = prefill_chunk_tokens
        self._sequences: dict[SequenceId, Running] = {}
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        """In order of arrival, oldest first."""
        self._begun: list[Running] = []

    def add(self, sequence_id: SequenceId, request: SequenceRequest, stop_token_ids: frozenset[int]) -> None:
        """Queues a sequence and takes over its blocks."""
        self._pool.move(request.blocks, request.blocks_holder, HOLDER)
        sequence = Running(
            sequence_id=sequence_id,
            request=request,
            stop_token_ids=stop_token_ids,
            tokens=list(request.token_ids),
            prompt_tokens=len(request.token_ids) - request.output_tokens_so_far,
            computed=request.computed_tokens,
            blocks=list(request.blocks),
        )
        if request.blocks:
            self._capture(sequence, ())
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

    def take_begun(self) -> tuple[Running, ...]:
        """Sequences that were let in since the last call and share cached blocks."""
        begun, self._begun = tuple(self._begun), []
        return begun

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
            if self._prefixes is not None:
                self._prefixes.keep(sequence)
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
        self._pool.free(blocks, HOLDER)

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
        """Blocks for all its tokens, shared ones first; leaves one for each running sequence to grow into."""
        reuse = None if self._prefixes is None else self._prefixes.wanted(sequence)
        needed = self._blocks_for(len(sequence.tokens))
        try:
            granted = self._pool.grant(needed, HOLDER, reuse=reuse, leave_free=len(self._running))
        except Exhausted:
            return False
        sequence.blocks.extend(granted.blocks)
        self._begin(sequence, granted.reused)
        return True

    def _begin(self, sequence: Running, reused: tuple[CachedBlock, ...]) -> None:
        kept = () if self._prefixes is None else self._prefixes.begin(sequence, reused)
        self._capture(sequence, kept)
        if reused:
            self._begun.append(sequence)

    def _capture(self, sequence: Running, kept: tuple[Place, ...]) -> None:
        """Sets up which rows of what it computes are copied out: those to show and those to keep."""
        request = sequence.request
        sequence.shown = request.witness_places
        if request.choose_witnesses is not None:
            sequence.shown = request.choose_witnesses(sequence.computed)
        places = {*kept, *(place for place in sequence.shown if place.token >= sequence.computed)}
        sequence.tap = WitnessTap(places) if places else None

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
                if end > len(sequence.request.token_ids) and sequence.kept_blocks == len(sequence.names):
                    # All rows to show or keep are of tokens that were computed before.
                    sequence.tap = None
                batch.append(
                    Rows(
                        sequence=sequence, start=end - 1, end=end, decodes=True, samples=True, stored=end - 1
                    )
                )
        return tuple(batch)

    def _preempt(self, sequence: Running) -> None:
        """Frees the blocks; prompt and output are computed again when there is room."""
        self._running.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        sequence.computed = 0
        sequence.reused, sequence.kept_blocks = (), 0
        self._waiting.appendleft(sequence)
        self._pool.free(blocks, HOLDER)

    def _prefill_rows(self) -> tuple[Rows, ...]:
        batch = []
        budget = self._chunk_tokens
        for sequence in self._running:
            if budget == 0:
                break
            if sequence.decodes:
                continue
            start = min(sequence.computed, len(sequence.tokens) - 1)
            end = min(len(sequence.tokens), start + budget)
            budget -= end - start
            batch.append(
                Rows(
                    sequence=sequence,
                    start=start,
                    end=end,
                    decodes=False,
                    samples=end == len(sequence.tokens),
                    stored=sequence.computed,
                )
            )
        return tuple(batch)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _may_give_way(sequence: Running) -> bool:
    return not (sequence.request.hold_blocks or sequence.request.keep_computed)
