"""Runs scheduled rows through the model and picks tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpact.engine.batch import Span, Step
from kvpact.engine.model import HostedModel
from kvpact.engine.running import Rows
from kvpact.engine.sampler import greedy
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import SequenceId


class Runner:
    """The model and the cache it writes; one thread at a time."""

    def __init__(self, model: HostedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache

    def run(self, batch: Sequence[Rows]) -> dict[SequenceId, torch.Tensor]:
        """Computes all rows in one forward; logits [vocabulary] of each sequence that samples."""
        logits_BV = self._model.forward(Step(self._cache, [_span(rows) for rows in batch]))
        sampling = [rows.sequence.sequence_id for rows in batch if rows.samples]
        return dict(zip(sampling, logits_BV, strict=True))

    def sample(self, logits: dict[SequenceId, torch.Tensor]) -> dict[SequenceId, int]:
        """One token for each sequence; a sequence whose logits hold a NaN is left out."""
        if not logits:
            return {}
        picked = greedy(torch.stack(tuple(logits.values()))[:, : self._model.vocab_size])
        return {key: token for key, token in zip(logits, picked, strict=True) if token is not None}


def _span(rows: Rows) -> Span:
    sequence = rows.sequence
    return Span(
        token_ids=sequence.tokens[rows.start : rows.end],
        positions=sequence.positions(rows.end),
        blocks=sequence.blocks,
        samples=rows.samples,
        stored=rows.stored,
        recorder=sequence.request.recorder,
        tap=sequence.tap,
    )
