"""What writer and reader of a handoff say to each other, as frozen values like the protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvpact.contract.contract import Contract, RotaryTable
from kvpact.handoff.regions import NixlRegion, ShmSegment
from kvpact.handoff.transport_choice import GRPC, TransportOffer
from kvpact.types import (
    ContractDigest,
    Exactness,
    HandoffId,
    PlanStep,
    PositionRun,
    Role,
    Verdict,
    WorkerCounters,
    WorkerLife,
    WorkerLoad,
)

Buffer = bytes | memoryview


class HandoffState(StrEnum):
    """State of a handoff on the reader's side."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    DECODING = "decoding"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """Table really used for one layer group; None for key_state NONE."""

    group: int
    table: RotaryTable | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPositions:
    """Positions [start, end) that the reader needs of one layer group."""

    group: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Adapter content that made a cache."""

    weights_digest: bytes
    rank: int
    alpha: float
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTerms:
    """Everything about one handoff that isn't in the contract."""

    handoff_id: HandoffId
    writer: WorkerLife
    reader: WorkerLife
    contract_digest: ContractDigest
    token_ids: tuple[int, ...]
    token_digest: bytes
    """SHA-256 over the prompt tokens as little-endian int32."""
    positions: tuple[PositionRun, ...]
    next_position: int
    table_length: int
    tables: tuple[GroupTable, ...]
    adapter: Adapter | None = None
    required: tuple[RequiredPositions, ...] = ()
    canary: bool = False
    """Whether this is the probe of a pair: judged on commit, then freed; Decode never gets it."""
    transport: str = GRPC
    """How the payload will travel; told at Reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room as the reader granted it."""

    handoff_id: HandoffId
    generation: int
    """Fences late writers; at least 1."""
    lease_s: float
    held_prefix_tokens: int
    chunk_cap_bytes: int
    transports: tuple[str, ...]
    """Best first."""
    nonce: bytes
    nixl: NixlRegion | None = None
    """Where the payload goes; set where transport nixl was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOffer:
    """A writer's contract, serialised; the body is decoded only if the reader knows `schema_major`."""

    schema_major: int
    contract_digest: ContractDigest
    writer: WorkerLife
    reader: WorkerLife
    contract: bytes
    shm_trial: ShmSegment | None = None
    """A small segment that the reader opens to prove that shared memory works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAnswer:
    """The whole verdict, reject included, with the reader's own contract."""

    verdict: Verdict
    reader_contract: Contract
    transports: tuple[TransportOffer, ...] = ()
    """Every one that the reader knows, whether or not it works between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """First part of a push."""

    handoff_id: HandoffId
    generation: int
    contract_digest: ContractDigest
    shm: ShmSegment | None = None
    """Where the payload lies; set where shm was reserved."""

    def inline(self) -> Open:
        """The same without a segment, for whoever keeps it beyond the handoff."""
        return replace(self, shm=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Where a chunk goes: the writer's blocks [block_start, block_start + block_count) of one layer."""

    handoff_id: HandoffId
    generation: int
    sequence: int
    layer: int
    block_start: int
    block_count: int
    key_bytes: int
    value_bytes: int
    key_scales: tuple[float, ...] = ()
    """Float32 scales of the chunk's keys, where the writer's contract ships scales."""
    value_scales: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Which chunk, for people."""
        stop = self.block_start + self.block_count
        return f"chunk {self.sequence} (layer {self.layer}, blocks [{self.block_start}, {stop}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Keys and values of some blocks, as the writer stores them. On the wire the values follow the keys."""

    header: ChunkHeader
    checksum: int
    """xxh3_64 over header, contract digest, token digest, keys and values."""
    keys: Buffer
    values: Buffer
    region_offset: int | None = None
    """Where the payload begins in the handoff's region; then only header, checksum and this travel.

    The writer's keys and values are views of its region until the handoff ends; a reader gets none and
    looks into the region itself.
    """

    def inline(self) -> Chunk:
        """The writer's chunk with a payload of its own, for whoever keeps it beyond the handoff."""
        return replace(self, keys=bytes(self.keys), values=bytes(self.values), region_offset=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Rows of one position that let the reader check what the writer says; float32, [head, lane]."""

    layer: int
    position: int
    raw_key: bytes
    attended_key: bytes
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Last part of a push."""

    chunk_count: int
    payload_bytes: int
    first_token_id: int
    first_token_logprob: float | None = None
    witnesses: tuple[Witness, ...] = ()
    first_computed_tokens: int = 0
    """First prompt token that the writer computed; those before came from its own cache."""


PushPart = Open | Chunk | Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOutcome:
    """How the probe of a pair went: one decode step from what landed against the reader's own prefill."""

    passed: bool
    max_abs_error: float
    """Largest absolute difference of logits; infinite where the probe never got that far."""
    tolerance: float
    finding: str = ""
    """What was found wrong, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessReport:
    """What the witnesses of a handoff showed."""

    row_count: int = 0
    shows_rotation: bool = False
    """Whether a row lies above position 0, where rotations can differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReceipt:
    """The reader owns the cache; what the conversion did."""

    exactness: Exactness
    max_abs_error: float | None
    """Set for a lossy plan only."""
    plan: tuple[PlanStep, ...]
    witnesses: WitnessReport = WitnessReport()
    canary: CanaryOutcome | None = None
    """Set for the probe of a pair only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker is and carries."""

    life: WorkerLife
    role: Role
    contract: Contract
    counters: WorkerCounters
    load: WorkerLoad
    pid: int
