"""Readers for replays: with an engine of the caller's model, or with a cache of the recorded form alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from decode_worker.canary import EngineJudge
from decode_worker.landing import CacheLanding
from decode_worker.verifier import CacheVerifier
from kvpact.clock import ManualClock, new_nonce
from kvpact.contract.contract import Contract
from kvpact.contract.judge import judge_at
from kvpact.engine.engine import Engine
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.handoff.capture import Capture
from kvpact.handoff.chunks import block_count
from kvpact.handoff.grants import Marks
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.held_prefix import HeldPrefixes
from kvpact.handoff.messages import CanaryOutcome, HandoffTerms
from kvpact.handoff.pairing import Judged
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.replay import recorded_policy
from kvpact.handoff.trust import CanaryJudge
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.cached_block import CachedBlock
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import BlockId

SPARE_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoAlarm:
    """Leases don't run in a replay: its clock stands still."""

    def cancel(self) -> None:
        """See Alarm."""


class _RecordedJudge:
    """Stands in for the judge where there is no engine: says what was recorded, once the bytes hold."""

    def __init__(self, pool: BlockPool, outcome: CanaryOutcome) -> None:
        self._pool = pool
        self._outcome = outcome

    def expect(self, writer: Contract, terms: HandoffTerms) -> None:
        """See CanaryJudge. Any probe will do."""

    async def judge(
        self, writer: Contract, terms: HandoffTerms, blocks: Sequence[BlockId], first_token_id: int
    ) -> CanaryOutcome:
        """See CanaryJudge."""
        self._pool.free(blocks, "canary")
        return self._outcome


def blocks_needed(capture: Capture, block_size: int) -> int:
    """Blocks of a reader that takes the captured handoff and decodes it to its end."""
    if capture.reserved is None:
        return SPARE_BLOCKS
    terms = capture.reserved.terms
    tokens = max(len(terms.token_ids) + capture.reserved.max_output_tokens, terms.table_length)
    return block_count(tokens, block_size) + SPARE_BLOCKS


@contextlib.asynccontextmanager
async def recorded_reader(capture: Capture) -> AsyncIterator[Receiver]:
    """A reader of the recorded contract with a cache and no engine: a canary is judged as it was recorded.

    Raises:
        UnreadableSource: the recorded reader's cache is of a form that kvpact's own can't keep.
    """
    contract = capture.answer.reader_contract
    blocks = blocks_needed(capture, contract.layout.block_size)
    try:
        cache = PagedCache(contract, blocks, torch.device("cpu"))
    except BadRequest as error:
        problem = (
            f"the recorded reader keeps a cache that can't be made here: {error}; see it with handoff show"
        )
        raise UnreadableSource(problem, source=contract.model.name) from error
    pool = BlockPool(blocks)
    with _receiver(
        capture, cache, pool, lambda: _RecordedJudge(pool, _recorded_outcome(capture))
    ) as receiver:
        yield receiver


@contextlib.asynccontextmanager
async def engine_reader(capture: Capture, engine: Engine) -> AsyncIterator[Receiver]:
    """A reader over an engine that the caller owns and has started; it judges a canary itself."""
    with _receiver(capture, engine.cache, engine.pool, lambda: EngineJudge(engine)) as receiver:
        yield receiver


@contextlib.contextmanager
def _receiver(
    capture: Capture, cache: PagedCache, pool: BlockPool, judge: Callable[[], CanaryJudge]
) -> Iterator[Receiver]:
    """By the recorded reader's name and life, with its nonce, generation and chunk cap."""
    asked = capture.reserved
    granted = None if asked is None else asked.reservation
    nonce, generation = (new_nonce(), 1) if granted is None else (granted.nonce, granted.generation)
    limits = ReceiverLimits(growth_watermark_blocks=0, reuse_prefixes=False)
    if asked is not None and granted is not None:
        held_tokens = granted.held_prefix_tokens
        limits = replace(
            limits,
            lease_s=granted.lease_s,
            chunk_cap_bytes=granted.chunk_cap_bytes,
            reuse_prefixes=held_tokens > 0,
        )
        _hold(capture, asked.terms, held_tokens, cache.contract, pool)
    receiver = Receiver(
        life=capture.offer.reader,
        contract=cache.contract,
        policy=recorded_policy(capture),
        pool=pool,
        landing=CacheLanding(cache),
        verifier=CacheVerifier(cache),
        judge=judge() if asked is not None and asked.terms.canary else None,
        clock=ManualClock(),
        limits=limits,
        call_later=lambda delay_s, callback: _NoAlarm(),
        marks=Marks(new_nonce=lambda: nonce, first_generation=generation),
    )
    try:
        yield receiver
    finally:
        receiver.close()


def _hold(
    capture: Capture, terms: HandoffTerms, held_tokens: int, contract: Contract, pool: BlockPool
) -> None:
    """Lets the pool know the prefix that the recorded reader had; its content is blank."""
    count = held_tokens // contract.layout.block_size
    if count == 0:
        return
    writer = capture.writer_contract()
    verdict = judge_at(writer, contract, recorded_policy(capture), terms.table_length)
    names = HeldPrefixes(contract).names(terms, Judged(contract=writer, verdict=verdict))
    groups = frozenset(range(len(contract.layer_groups)))
    blocks = pool.allocate(count, "prefix")
    for name, block in zip(names, blocks, strict=False):
        pool.keep(CachedBlock(name=name, block=block, whole_groups=groups))
    pool.free(blocks, "prefix")


def _recorded_outcome(capture: Capture) -> CanaryOutcome:
    recorded = None if capture.receipt is None else capture.receipt.canary
    return recorded or CanaryOutcome(
        passed=False, max_abs_error=0.0, tolerance=0.0, finding="no outcome was recorded"
    )
