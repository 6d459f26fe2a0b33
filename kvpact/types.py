"""Words of the house as types: ids, enums and the parts of a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

BlockId = NewType("BlockId", int)
HandoffId = NewType("HandoffId", bytes)
"""128 random bits."""
ContractDigest = NewType("ContractDigest", bytes)
"""SHA-256, 32 bytes."""
SequenceId = NewType("SequenceId", int)
"""Number of one sequence in one engine; never leaves the process."""


class Role(StrEnum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class KeyState(StrEnum):
    """How keys lie in the cache with respect to rotation."""

    RAW = "raw"
    ROTATED = "rotated"
    NONE = "none"


class RotationSite(StrEnum):
    """Who rotates keys."""

    WRITER = "writer"
    READER = "reader"
    KERNEL = "kernel"


class LaneOrder(StrEnum):
    """Which lanes pair: i with i + rotary_dim/2 (half_split), or 2i with 2i + 1 (adjacent)."""

    HALF_SPLIT = "half_split"
    ADJACENT = "adjacent"


class LayerKind(StrEnum):
    """Which keys a layer sees and what it stores."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA_LATENT = "mla_latent"
    MLA_EXPANDED = "mla_expanded"


class AxisOrder(StrEnum):
    """Axes inside a block: [token, head, lane] or [head, token, lane]."""

    NHD = "NHD"
    HND = "HND"


class Packing(StrEnum):
    """Whether keys and values of a block lie apart."""

    SEPARATE = "separate"
    PACKED = "packed"


class ByteOrder(StrEnum):
    """Order of the bytes of one number."""

    LITTLE = "little"
    BIG = "big"


class Dtype(StrEnum):
    """Number format."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"


class QuantizationScheme(StrEnum):
    """How stored numbers map to real ones."""

    NONE = "none"
    SYMMETRIC = "symmetric"


class QuantizationGranularity(StrEnum):
    """Over which elements one scale holds."""

    TENSOR = "tensor"
    HEAD = "head"
    TOKEN = "token"


class ScaleSource(StrEnum):
    """Where scales come from."""

    SHIPPED = "shipped"
    FIXED = "fixed"


class FrequencyPolicy(StrEnum):
    """How a rotary table is picked."""

    FROZEN = "frozen"
    BY_REQUEST_LENGTH = "by_request_length"
    BY_SERVED_LENGTH = "by_served_length"
    BY_CURRENT_LENGTH = "by_current_length"


class Basis(StrEnum):
    """Linear change of basis applied to keys after rotation."""

    IDENTITY = "identity"
    HADAMARD = "hadamard"


class VerdictWord(StrEnum):
    """Last word of a comparison."""

    ACCEPT = "accept"
    CONVERT = "convert"
    REJECT = "reject"


class IdentityRelation(StrEnum):
    """Whether both sides are one function."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"


class Relation(StrEnum):
    """How the two values of one field relate."""

    INCOMPATIBLE = "incompatible"
    CONVERTIBLE = "convertible"
    ROUNDING = "rounding"
    NOTED = "noted"


class DifferenceAction(StrEnum):
    """What the reader does about a difference."""

    REJECT = "reject"
    CONVERT = "convert"
    ACCEPT = "accept"


class Exactness(StrEnum):
    """What a conversion does to numbers, from best to worst."""

    BIT_EXACT = "bit_exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


class PlanOp(StrEnum):
    """Step of a conversion on landing, in the order in which plans list them."""

    GATHER = "gather"
    SWAP_BYTES = "swap_bytes"
    REPACK = "repack"
    DEQUANTIZE = "dequantize"
    UNROTATE = "unrotate"
    REORDER_LANES = "reorder_lanes"
    RELAYOUT = "relayout"
    REBLOCK = "reblock"
    ROTATE = "rotate"
    CAST = "cast"
    QUANTIZE = "quantize"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """One life of one worker process."""

    worker: str
    incarnation: bytes
    """16 random bytes drawn at process start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One contract field on which writer and reader differ."""

    field: str
    layers: tuple[int, ...]
    """Layers concerned, ascending; empty means the whole contract."""
    writer: str
    reader: str
    relation: Relation
    action: DifferenceAction
    remedy: str
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One step of a conversion."""

    op: PlanOp
    exactness: Exactness
    bound_epsilons: float | None = None
    """Error bound in epsilons of the narrowest dtype passed; set for ROUNDING only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of comparing a writer's contract with a reader's."""

    word: VerdictWord
    identity: IdentityRelation
    differences: tuple[Difference, ...]
    plan: tuple[PlanStep, ...]
    exactness: Exactness
    writer_digest: ContractDigest
    reader_digest: ContractDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRun:
    """Consecutive positions [start, start + count) of consecutive tokens."""

    start: int
    count: int
    slot_start: int | None = None
    """Cache slot of the first token where slots differ from positions; None: slot = position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks of one pool. A free one may be `cached`: its content can be reused until it is handed out."""

    free: int
    total: int
    held: tuple[tuple[str, int], ...] = ()
    """Blocks by holder, such as ("sequence", 3); one with several holders counts for each."""
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker carries now."""

    running_requests: int
    waiting_requests: int
    blocks: BlockCounts
    draining: bool
    quarantined_staging_bytes: int = 0
    """Memory for payloads beside messages that nobody may have, since a partner might still write into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounters:
    """Work of one process life. Self-check and canary tokens are not counted.

    Prefix tokens: prompt tokens that were looked up among cached blocks, and those that were found.
    """

    computed_prompt_tokens: int = 0
    computed_output_tokens: int = 0
    forward_steps: int = 0
    committed_handoffs: int = 0
    failed_handoffs: int = 0
    handoff_bytes: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one sequence are picked and when it ends. Temperature is 0: greedy."""

    max_output_tokens: int
    """Output tokens in all, the first one included, at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
