"""State of one sequence in the engine, and the rows of it that one forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.contract.content_identity import ContentId
from kvpact.contract.witness_places import Place
from kvpact.engine.requests import SequenceRequest
from kvpact.engine.witness_tap import WitnessTap
from kvpact.kvcache.cached_block import CachedBlock
from kvpact.types import BlockId, FinishReason, SequenceId


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
    shown: tuple[Place, ...] = ()
    """Rows to give out with the first token, those of cached blocks included."""
    names: tuple[ContentId, ...] = ()
    """Of the whole blocks that it would compute; empty where it neither takes nor leaves cached blocks."""
    reused: tuple[CachedBlock, ...] = ()
    """The first of `blocks`, which others may hold too."""
    kept_blocks: int = 0
    """Blocks that are known by their names: never written again."""
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
    stored: int
    """Tokens whose keys and values lie in the cache: those of rows below are read and not written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of some rows. `token_id` is None for a chunk that isn't a prompt's last."""

    rows: Rows
    token_id: int | None
    finish_reason: FinishReason | None
