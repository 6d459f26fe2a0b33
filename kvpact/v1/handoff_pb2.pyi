import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvpact.v1 import contract_pb2 as _contract_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class HandoffState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_STATE_UNSPECIFIED: _ClassVar[HandoffState]
    HANDOFF_STATE_RESERVED: _ClassVar[HandoffState]
    HANDOFF_STATE_COMMITTED: _ClassVar[HandoffState]
    HANDOFF_STATE_DECODING: _ClassVar[HandoffState]
    HANDOFF_STATE_RELEASED: _ClassVar[HandoffState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
HANDOFF_STATE_UNSPECIFIED: HandoffState
HANDOFF_STATE_RESERVED: HandoffState
HANDOFF_STATE_COMMITTED: HandoffState
HANDOFF_STATE_DECODING: HandoffState
HANDOFF_STATE_RELEASED: HandoffState

class Incarnation(_message.Message):
    __slots__ = ("worker", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: bytes
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class PositionRun(_message.Message):
    __slots__ = ("start", "count_tokens", "slot_start")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_START_FIELD_NUMBER: _ClassVar[int]
    start: int
    count_tokens: int
    slot_start: int
    def __init__(self, start: _Optional[int] = ..., count_tokens: _Optional[int] = ..., slot_start: _Optional[int] = ...) -> None: ...

class GroupTable(_message.Message):
    __slots__ = ("group", "table")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    group: int
    table: _contract_pb2.RotaryTable
    def __init__(self, group: _Optional[int] = ..., table: _Optional[_Union[_contract_pb2.RotaryTable, _Mapping]] = ...) -> None: ...

class RequiredPositions(_message.Message):
    __slots__ = ("group", "start", "end")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    group: int
    start: int
    end: int
    def __init__(self, group: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("weights_digest", "rank", "alpha", "scale", "targets")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    weights_digest: bytes
    rank: int
    alpha: float
    scale: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, weights_digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., scale: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class HandoffTerms(_message.Message):
    __slots__ = ("handoff_id", "writer", "reader", "contract_digest", "token_ids", "token_digest", "positions", "next_position", "table_length_tokens", "tables", "adapter", "required", "canary")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    TABLE_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    writer: Incarnation
    reader: Incarnation
    contract_digest: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_digest: bytes
    positions: _containers.RepeatedCompositeFieldContainer[PositionRun]
    next_position: int
    table_length_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[GroupTable]
    adapter: Adapter
    required: _containers.RepeatedCompositeFieldContainer[RequiredPositions]
    canary: bool
    def __init__(self, handoff_id: _Optional[bytes] = ..., writer: _Optional[_Union[Incarnation, _Mapping]] = ..., reader: _Optional[_Union[Incarnation, _Mapping]] = ..., contract_digest: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_digest: _Optional[bytes] = ..., positions: _Optional[_Iterable[_Union[PositionRun, _Mapping]]] = ..., next_position: _Optional[int] = ..., table_length_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[GroupTable, _Mapping]]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., required: _Optional[_Iterable[_Union[RequiredPositions, _Mapping]]] = ..., canary: _Optional[bool] = ...) -> None: ...

class Witness(_message.Message):
    __slots__ = ("layer", "position", "raw_key", "attended_key", "value")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RAW_KEY_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    position: int
    raw_key: bytes
    attended_key: bytes
    value: bytes
    def __init__(self, layer: _Optional[int] = ..., position: _Optional[int] = ..., raw_key: _Optional[bytes] = ..., attended_key: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("handoff_id", "generation", "sequence", "layer", "block_start", "block_count", "key_bytes", "value_bytes", "key_scales", "value_scales")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    generation: int
    sequence: int
    layer: int
    block_start: int
    block_count: int
    key_bytes: int
    value_bytes: int
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handoff_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ..., layer: _Optional[int] = ..., block_start: _Optional[int] = ..., block_count: _Optional[int] = ..., key_bytes: _Optional[int] = ..., value_bytes: _Optional[int] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "available", "reason", "agent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    available: bool
    reason: str
    agent: bytes
    def __init__(self, name: _Optional[str] = ..., available: _Optional[bool] = ..., reason: _Optional[str] = ..., agent: _Optional[bytes] = ...) -> None: ...

class ShmSegment(_message.Message):
    __slots__ = ("pid", "fd", "size_bytes", "token")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    size_bytes: int
    token: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., size_bytes: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class NixlRegion(_message.Message):
    __slots__ = ("address", "size_bytes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    address: int
    size_bytes: int
    def __init__(self, address: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("handoff_id", "generation", "lease", "held_prefix_tokens", "chunk_cap_bytes", "transports", "nonce", "nixl")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    generation: int
    lease: _duration_pb2.Duration
    held_prefix_tokens: int
    chunk_cap_bytes: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    nonce: bytes
    nixl: NixlRegion
    def __init__(self, handoff_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., held_prefix_tokens: _Optional[int] = ..., chunk_cap_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., nonce: _Optional[bytes] = ..., nixl: _Optional[_Union[NixlRegion, _Mapping]] = ...) -> None: ...

class HeldBlocks(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("free", "total", "held", "cached")
    FREE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    free: int
    total: int
    held: _containers.RepeatedCompositeFieldContainer[HeldBlocks]
    cached: int
    def __init__(self, free: _Optional[int] = ..., total: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldBlocks, _Mapping]]] = ..., cached: _Optional[int] = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("computed_prompt_tokens", "computed_output_tokens", "forward_steps", "committed_handoffs", "failed_handoffs", "handoff_bytes", "prefix_query_tokens", "prefix_hit_tokens")
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_prompt_tokens: int
    computed_output_tokens: int
    forward_steps: int
    committed_handoffs: int
    failed_handoffs: int
    handoff_bytes: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    def __init__(self, computed_prompt_tokens: _Optional[int] = ..., computed_output_tokens: _Optional[int] = ..., forward_steps: _Optional[int] = ..., committed_handoffs: _Optional[int] = ..., failed_handoffs: _Optional[int] = ..., handoff_bytes: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "blocks", "draining", "quarantined_staging_bytes")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    blocks: BlockCounts
    draining: bool
    quarantined_staging_bytes: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., draining: _Optional[bool] = ..., quarantined_staging_bytes: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("handoff_id", "worker")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    worker: Incarnation
    def __init__(self, handoff_id: _Optional[bytes] = ..., worker: _Optional[_Union[Incarnation, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _duration_pb2.Duration
    def __init__(self, lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("handoff_id", "reason", "writer_stopped")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WRITER_STOPPED_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    reason: str
    writer_stopped: bool
    def __init__(self, handoff_id: _Optional[bytes] = ..., reason: _Optional[str] = ..., writer_stopped: _Optional[bool] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("previous_state",)
    PREVIOUS_STATE_FIELD_NUMBER: _ClassVar[int]
    previous_state: HandoffState
    def __init__(self, previous_state: _Optional[_Union[HandoffState, str]] = ...) -> None: ...

class GetVerdictRequest(_message.Message):
    __slots__ = ("writer_digest", "reader_digest")
    WRITER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    READER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    writer_digest: bytes
    reader_digest: bytes
    def __init__(self, writer_digest: _Optional[bytes] = ..., reader_digest: _Optional[bytes] = ...) -> None: ...

class GetVerdictResponse(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: _contract_pb2.Verdict
    def __init__(self, verdict: _Optional[_Union[_contract_pb2.Verdict, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker", "role", "contract", "counters", "load", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: Incarnation
    role: Role
    contract: _contract_pb2.Contract
    counters: WorkerCounters
    load: WorkerLoad
    pid: int
    def __init__(self, worker: _Optional[_Union[Incarnation, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., contract: _Optional[_Union[_contract_pb2.Contract, _Mapping]] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...
