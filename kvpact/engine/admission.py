"""What an engine takes in: refuses sequences that it could never compute, before anything is queued."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvpact.engine.requests import SequenceRequest
from kvpact.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Limits of one engine."""

    vocab_size: int
    context_tokens: int
    block_size: int
    total_blocks: int

    def check(self, request: SequenceRequest) -> None:
        """Raises BadRequest for tokens out of range, or too many for the context or the whole pool."""
        self._check_tokens(request)
        _check_positions(request)
        self._check_room(request)
        tokens, room = len(request.token_ids), len(request.blocks) * self.block_size
        assert 0 <= request.computed_tokens <= min(tokens, room)
        assert bool(request.blocks) == bool(request.computed_tokens)
        assert request.stop_after_first or not (request.hold_blocks or request.keep_computed)
        assert not request.keep_computed or tokens <= room
        assert all(request.computed_tokens <= place.token < tokens for place in request.witness_places)
        assert not (request.witness_places and request.choose_witnesses)

    def _check_tokens(self, request: SequenceRequest) -> None:
        if not request.token_ids:
            raise BadRequest("the prompt is empty; expected at least one token", param="prompt")
        wrong = next((token for token in request.token_ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"token id {wrong} is outside [0, {self.vocab_size})", param="prompt")

    def _check_room(self, request: SequenceRequest) -> None:
        tokens, limit = request.token_ids, request.sampling.max_output_tokens
        remaining = 1 if request.stop_after_first else limit - request.output_tokens_so_far
        if remaining < 1:
            raise BadRequest(f"max_tokens {limit}: no token is left to compute", param="max_tokens")
        next_position = len(tokens) if request.positions is None else request.positions[-1] + 1
        if next_position >= self.context_tokens:
            raise BadRequest(
                f"{next_position} tokens leave no room in a context of {self.context_tokens}",
                param="prompt",
                code="context_length_exceeded",
            )
        stored = min(len(tokens) + remaining, self.context_tokens) - 1
        if stored > self.total_blocks * self.block_size:
            raise BadRequest(
                f"{stored} tokens can't fit in {self.total_blocks} blocks of {self.block_size}; "
                "raise cache.blocks",
                param="max_tokens",
            )


def _check_positions(request: SequenceRequest) -> None:
    given = request.positions
    if given is None:
        return
    if len(given) != len(request.token_ids):
        raise BadRequest(f"{len(given)} positions for {len(request.token_ids)} tokens", param="positions")
    if given[0] < 0 or any(after <= before for before, after in pairwise(given)):
        raise BadRequest("positions don't ascend from 0 or above", param="positions")
