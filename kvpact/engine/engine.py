"""The engine: takes sequences from any thread, computes them on one of its own, tells what it computed."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import count

import torch

from kvpact.contract.contract import Contract
from kvpact.engine.admission import Admission
from kvpact.engine.loading import Loaded, load
from kvpact.engine.prefix import PrefixCache
from kvpact.engine.requests import (
    ChunkComputed,
    EngineCounters,
    EngineEvent,
    EngineSettings,
    OnEvent,
    PrefixReused,
    SequenceFailed,
    SequenceRequest,
    TokenComputed,
    WitnessesComputed,
    WitnessRow,
)
from kvpact.engine.runner import Runner
from kvpact.engine.running import Outcome, Rows, Running
from kvpact.engine.scheduler import Scheduler
from kvpact.errors import KvpactError, Unavailable
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import SequenceId

log = logging.getLogger(__name__)


class Engine:
    """One model with its paged cache. Every method may be called from any thread."""

    def __init__(self, settings: EngineSettings, loaded: Loaded) -> None:
        self.contract: Contract = loaded.contract
        self.pool: BlockPool = BlockPool(settings.cache.blocks)
        self.cache: PagedCache = loaded.cache
        self.model = loaded.model
        self.eos_token_ids = loaded.eos_token_ids
        self._prefixes = PrefixCache(self.contract, self.pool) if settings.engine.prefix_cache else None
        self._admission = Admission(
            vocab_size=loaded.model.vocab_size,
            context_tokens=loaded.contract.model.context_tokens,
            block_size=loaded.contract.layout.block_size,
            total_blocks=self.pool.total,
        )
        self._runner = Runner(loaded.model, loaded.cache)
        self._scheduler = Scheduler(
            pool=self.pool,
            block_size=self._admission.block_size,
            context_tokens=self._admission.context_tokens,
            prefixes=self._prefixes,
            max_sequences=settings.engine.max_sequences,
            prefill_chunk_tokens=settings.engine.prefill_chunk_tokens,
        )
        self._listeners: dict[SequenceId, OnEvent] = {}
        self._counters = EngineCounters()
        self._ids = count(1)
        self._changed = threading.Condition()
        """Guards everything above; notified when there may be something to compute."""
        self._closing = False
        self._dirty = False
        self._thread: threading.Thread | None = None
        self._stop_listening = self.pool.on_free(self._note_change)

    @classmethod
    def load(cls, settings: EngineSettings) -> Engine:
        """Loads the model, derives its contract and proves by the self-check that the contract is what runs.

        Raises:
            UnreadableSource: the folder or a config fact can't be used.
            SelfCheckFailed: the engine doesn't reproduce the model's own forward.
        """
        return cls(settings, load(settings))

    def start(self) -> None:
        """Starts the computing thread. Not twice."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._compute_until_closed, name="kvpact-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fails every sequence as Unavailable, frees their blocks and joins the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._stop_listening()
        self._end_all()

    def submit(self, request: SequenceRequest, on_event: OnEvent) -> SequenceId:
        """Queues a sequence and takes over `request.blocks`; on_event is called on the engine thread.

        Raises:
            BadRequest: tokens out of range, or too long for the context or the whole pool.
            Unavailable: the engine is closing. After either, the blocks are still the caller's.
        """
        self._admission.check(request)
        stop = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            stop |= self.eos_token_ids
        with self._changed:
            if self._closing:
                raise Unavailable("the engine is closing")
            sequence_id = SequenceId(next(self._ids))
            self._listeners[sequence_id] = on_event
            self._scheduler.add(sequence_id, request, stop)
            self._note_change()
        return sequence_id

    def cancel(self, sequence_id: SequenceId) -> None:
        """Ends a sequence at any state; its blocks are free after the running forward. Idempotent.

        No event follows but one that is being told at this moment.
        """
        with self._changed:
            self._listeners.pop(sequence_id, None)
            self._scheduler.drop(sequence_id)

    def release(self, sequence_id: SequenceId) -> None:
        """Frees the blocks that a sequence with `hold_blocks` still holds."""
        self.cancel(sequence_id)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether whole blocks of equal content are computed once."""
        return self._prefixes is not None

    def forget_prefixes(self) -> None:
        """Makes every cached block unknown, so that nothing is computed from it any more."""
        self.pool.forget(lambda _: True)

    def counters(self) -> EngineCounters:
        """Work since load."""
        with self._changed:
            prefixes = self._prefixes
            if prefixes is None:
                return self._counters
            return replace(
                self._counters,
                prefix_query_tokens=prefixes.query_tokens,
                prefix_hit_tokens=prefixes.hit_tokens,
            )

    def load_now(self) -> tuple[int, int]:
        """Sequences that compute and sequences that wait."""
        with self._changed:
            return self._scheduler.load_now()

    def step(self) -> bool:
        """Computes one batch on the calling thread; False if nothing can run now."""
        with self._changed:
            batch = self._scheduler.next_batch()
            begun = self._scheduler.take_begun()
        for sequence in begun:
            self._report_prefix(sequence)
        if not batch:
            return False
        try:
            logits = self._runner.run(batch)
            tokens = self._runner.sample(logits)
        except Exception as error:
            log.exception("forward of %d sequences failed", len(batch))
            self._fail(batch, error)
            return True
        broken = tuple(rows for rows in batch if rows.samples and rows.sequence.sequence_id not in tokens)
        if broken:
            self._forget_blocks(broken)
            self._fail(broken, KvpactError("the model's logits aren't numbers"))
            batch = tuple(rows for rows in batch if rows not in broken)
        with self._changed:
            outcomes = self._scheduler.advance(batch, tokens)
            self._count(batch)
        for outcome in outcomes:
            self._report(outcome, logits)
        return True

    def alive(self) -> bool:
        """Whether sequences still get computed; False once the computing thread ended."""
        return self._thread is None or self._thread.is_alive()

    def _compute_until_closed(self) -> None:
        try:
            while self._wait_for_change():
                while not self._closing and self.step():
                    pass
        except Exception:
            log.exception("the engine's thread ended by an error; no sequence is computed any more")
        self._end_all()

    def _end_all(self) -> None:
        """Refuses new sequences and fails those that are there; their blocks come back."""
        with self._changed:
            self._closing = True
            sequence_ids = self._scheduler.sequence_ids()
            for sequence_id in sequence_ids:
                self._scheduler.drop(sequence_id)
        for sequence_id in sequence_ids:
            error = Unavailable("the engine ended")
            self._tell(SequenceFailed(sequence_id=sequence_id, error=error), last=True)

    def _wait_for_change(self) -> bool:
        """Sleeps until something changed; False once the engine is closing."""
        with self._changed:
            while not (self._dirty or self._closing):
                self._changed.wait()
            self._dirty = False
            return not self._closing

    def _note_change(self) -> None:
        with self._changed:
            self._dirty = True
            self._changed.notify_all()

    def _count(self, batch: tuple[Rows, ...]) -> None:
        counted = [rows for rows in batch if rows.sequence.request.counted]
        prompt = sum(rows.end - rows.start for rows in counted if not rows.decodes)
        self._counters = EngineCounters(
            computed_prompt_tokens=self._counters.computed_prompt_tokens + prompt,
            computed_output_tokens=self._counters.computed_output_tokens
            + sum(rows.decodes for rows in counted),
            forward_steps=self._counters.forward_steps + bool(counted),
        )

    def _report(self, outcome: Outcome, logits: dict[SequenceId, torch.Tensor]) -> None:
        rows = outcome.rows
        request, sequence_id = rows.sequence.request, rows.sequence.sequence_id
        if request.hold_blocks:
            blocks = tuple(rows.sequence.blocks)
            self._tell(
                ChunkComputed(sequence_id=sequence_id, computed_tokens=rows.end, blocks=blocks), last=False
            )
        if outcome.token_id is None:
            return
        if rows.sequence.shown and rows.end == len(request.token_ids):
            witnesses = self._shown_rows(rows.sequence)
            self._tell(WitnessesComputed(sequence_id=sequence_id, rows=witnesses), last=False)
        event = TokenComputed(
            sequence_id=sequence_id,
            token_id=outcome.token_id,
            finish_reason=outcome.finish_reason,
            logits=logits[sequence_id].float() if request.want_logits else None,
        )
        self._tell(event, last=outcome.finish_reason is not None or request.stop_after_first)

    def _report_prefix(self, sequence: Running) -> None:
        if not sequence.request.hold_blocks:
            return
        event = PrefixReused(
            sequence_id=sequence.sequence_id,
            computed_tokens=sequence.computed,
            blocks=tuple(sequence.blocks),
        )
        self._tell(event, last=False)

    def _shown_rows(self, sequence: Running) -> tuple[WitnessRow, ...]:
        """Rows of `sequence.shown`, in order: kept ones of shared blocks and those that it computed."""
        kept = self._prefixes.shown_rows(sequence) if self._prefixes and sequence.reused else ()
        known = {row.place for row in kept}
        computed = [place for place in sequence.shown if place not in known]
        rows = kept if sequence.tap is None else (*kept, *sequence.tap.rows(computed))
        return tuple(sorted(rows, key=lambda row: row.place))

    def _fail(self, batch: tuple[Rows, ...], error: Exception) -> None:
        """Ends the sequences of a forward that failed; the engine goes on with the others."""
        shown = error if isinstance(error, KvpactError) else KvpactError(f"a forward failed: {error}")
        with self._changed:
            failed = self._scheduler.abort(batch)
        for sequence_id in failed:
            self._tell(SequenceFailed(sequence_id=sequence_id, error=shown), last=True)

    def _forget_blocks(self, batch: tuple[Rows, ...]) -> None:
        """Makes what these sequences read and wrote unknown, so that later ones don't compute from it."""
        blocks = {block for rows in batch for block in rows.sequence.blocks}
        self.pool.forget(lambda entry: entry.block in blocks)

    def _tell(self, event: EngineEvent, *, last: bool) -> None:
        with self._changed:
            on_event = self._listeners.get(event.sequence_id)
            if last:
                self._listeners.pop(event.sequence_id, None)
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception:
            log.exception("listener of sequence %d failed; the sequence is cancelled", event.sequence_id)
            self.cancel(event.sequence_id)
