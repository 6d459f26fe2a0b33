"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.config import CacheConfig, EngineConfig
from kvpact.errors import KvpactError
from kvpact.types import BlockId, FinishReason, Sampling, SequenceId

if TYPE_CHECKING:
    import torch

    from kvpact.contract.identity import IdentityDigests
    from kvpact.contract.witness_places import Place
    from kvpact.engine.trace import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All that one engine is made from."""

    model_folder: Path
    override: dict[str, Any]
    """Fields of the model's config to set before loading."""
    cache: CacheConfig
    engine: EngineConfig
    max_model_len: int | None
    """Served context in tokens; None: the model's own."""
    identity: IdentityDigests
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to go on with."""

    token_ids: tuple[int, ...]
    """Prompt tokens, then the output tokens so far."""
    sampling: Sampling
    table_length: int
    """Length for which the rotary table was chosen; fixed for the whole request."""
    output_tokens_so_far: int = 0
    blocks: tuple[BlockId, ...] = ()
    """Hold the keys and values of the first `computed_tokens` tokens; the engine owns them from here."""
    computed_tokens: int = 0
    """All tokens: the last one's row is computed once more for its logits, and not written."""
    blocks_holder: str = "sequence"
    """Under which name the pool knows the holder of `blocks` until the engine owns them."""
    stop_after_first: bool = False
    """End after one token, whatever `sampling` still allows."""
    hold_blocks: bool = False
    """With `stop_after_first`: the blocks stay held after the token, until `release`."""
    want_logits: bool = False
    recorder: Recorder | None = None
    """Told of every attention of this sequence; for parity reports."""
    positions: tuple[int, ...] | None = None
    """Position of each of `token_ids`, ascending, gaps allowed; what follows counts on from the last. None:
    from 0 without gaps. Tokens lie densely in `blocks` either way."""
    witness_places: tuple[Place, ...] = ()
    """Rows to give out in WitnessesComputed, of tokens that this request computes."""
    choose_witnesses: Callable[[int], tuple[Place, ...]] | None = None
    """Given how many tokens are taken from cached blocks, the rows to give out in WitnessesComputed: any of
    tokens that are computed, and of cached blocks the rows that they keep. Called once, when it begins."""
    keep_computed: bool = False
    """Never preempted, since `blocks` hold what mustn't be computed again; they have room for all tokens."""
    counted: bool = True
    """Whether the work counts in EngineCounters; that of probes doesn't."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether it may share cached blocks and leave its own to others: no probe, and no watched one."""
        return self.counted and self.recorder is None and not self.witness_places


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReused:
    """Told of a sequence with `hold_blocks` when it begins and shares its first blocks with others."""

    sequence_id: SequenceId
    computed_tokens: int
    """Tokens whose keys and values lie in shared blocks."""
    blocks: tuple[BlockId, ...]
    """All blocks of the sequence, which the engine owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    """Keys and values of the first `computed_tokens` tokens lie in `blocks`, which the engine still owns."""

    sequence_id: SequenceId
    computed_tokens: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessRow:
    """One token's row of one layer, float32 [H, D] in host memory, lanes in the contract's stored order."""

    place: Place
    raw_key_HD: torch.Tensor
    """After normalisation, before rotation."""
    attended_key_HD: torch.Tensor
    """As it was multiplied with queries: read from the cache and rotated."""
    value_HD: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessesComputed:
    """The rows that were asked for, in order of their places; told once, before the first token."""

    sequence_id: SequenceId
    rows: tuple[WitnessRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenComputed:
    """One more output token. With a finish reason, the last; a stop token is given out as well."""

    sequence_id: SequenceId
    token_id: int
    finish_reason: FinishReason | None
    logits: torch.Tensor | None
    """float32 [vocabulary] the token was picked from, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailed:
    """The sequence ended by an error; its blocks are back."""

    sequence_id: SequenceId
    error: KvpactError


EngineEvent = PrefixReused | ChunkComputed | WitnessesComputed | TokenComputed | SequenceFailed
OnEvent = Callable[[EngineEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Work since load, the self-check and probes left out."""

    computed_prompt_tokens: int = 0
    """Tokens of prefill chunks; output tokens that are computed again after a preemption count here."""
    computed_output_tokens: int = 0
    """Tokens of decode rows."""
    forward_steps: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up among cached blocks."""
    prefix_hit_tokens: int = 0
    """Those that were found, and so not computed."""
