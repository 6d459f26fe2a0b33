from kvpact.v1 import contract_pb2 as _contract_pb2
from kvpact.v1 import handoff_pb2 as _handoff_pb2
from kvpact.v1 import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairRequest(_message.Message):
    __slots__ = ("schema_major", "contract_digest", "writer", "reader", "contract", "shm_trial")
    SCHEMA_MAJOR_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    SHM_TRIAL_FIELD_NUMBER: _ClassVar[int]
    schema_major: int
    contract_digest: bytes
    writer: _handoff_pb2.Incarnation
    reader: _handoff_pb2.Incarnation
    contract: bytes
    shm_trial: _handoff_pb2.ShmSegment
    def __init__(self, schema_major: _Optional[int] = ..., contract_digest: _Optional[bytes] = ..., writer: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., reader: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., contract: _Optional[bytes] = ..., shm_trial: _Optional[_Union[_handoff_pb2.ShmSegment, _Mapping]] = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("verdict", "reader_contract", "transports")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    READER_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    verdict: _contract_pb2.Verdict
    reader_contract: _contract_pb2.Contract
    transports: _containers.RepeatedCompositeFieldContainer[_handoff_pb2.TransportOffer]
    def __init__(self, verdict: _Optional[_Union[_contract_pb2.Verdict, _Mapping]] = ..., reader_contract: _Optional[_Union[_contract_pb2.Contract, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[_handoff_pb2.TransportOffer, _Mapping]]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("terms", "max_output_tokens", "transport")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    terms: _handoff_pb2.HandoffTerms
    max_output_tokens: int
    transport: str
    def __init__(self, terms: _Optional[_Union[_handoff_pb2.HandoffTerms, _Mapping]] = ..., max_output_tokens: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: _handoff_pb2.Reservation
    def __init__(self, reservation: _Optional[_Union[_handoff_pb2.Reservation, _Mapping]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("open", "chunk", "commit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    open: PushOpen
    chunk: PushChunk
    commit: PushCommit
    def __init__(self, open: _Optional[_Union[PushOpen, _Mapping]] = ..., chunk: _Optional[_Union[PushChunk, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class PushOpen(_message.Message):
    __slots__ = ("handoff_id", "generation", "contract_digest", "shm")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    generation: int
    contract_digest: bytes
    shm: _handoff_pb2.ShmSegment
    def __init__(self, handoff_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., contract_digest: _Optional[bytes] = ..., shm: _Optional[_Union[_handoff_pb2.ShmSegment, _Mapping]] = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("header", "checksum", "region_offset", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REGION_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _handoff_pb2.ChunkHeader
    checksum: int
    region_offset: int
    payload: bytes
    def __init__(self, header: _Optional[_Union[_handoff_pb2.ChunkHeader, _Mapping]] = ..., checksum: _Optional[int] = ..., region_offset: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushCommit(_message.Message):
    __slots__ = ("chunk_count", "payload_bytes", "first_token_id", "first_token_logprob", "witnesses", "first_computed_tokens")
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    WITNESSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chunk_count: int
    payload_bytes: int
    first_token_id: int
    first_token_logprob: float
    witnesses: _containers.RepeatedCompositeFieldContainer[_handoff_pb2.Witness]
    first_computed_tokens: int
    def __init__(self, chunk_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., first_token_id: _Optional[int] = ..., first_token_logprob: _Optional[float] = ..., witnesses: _Optional[_Iterable[_Union[_handoff_pb2.Witness, _Mapping]]] = ..., first_computed_tokens: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("exactness", "max_abs_error", "plan", "canary", "witnesses")
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_ERROR_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    WITNESSES_FIELD_NUMBER: _ClassVar[int]
    exactness: _contract_pb2.Exactness
    max_abs_error: float
    plan: _containers.RepeatedCompositeFieldContainer[_contract_pb2.PlanStep]
    canary: _prefill_pb2.CanaryResult
    witnesses: WitnessReport
    def __init__(self, exactness: _Optional[_Union[_contract_pb2.Exactness, str]] = ..., max_abs_error: _Optional[float] = ..., plan: _Optional[_Iterable[_Union[_contract_pb2.PlanStep, _Mapping]]] = ..., canary: _Optional[_Union[_prefill_pb2.CanaryResult, _Mapping]] = ..., witnesses: _Optional[_Union[WitnessReport, _Mapping]] = ...) -> None: ...

class WitnessReport(_message.Message):
    __slots__ = ("row_count", "shows_rotation")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHOWS_ROTATION_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    shows_rotation: bool
    def __init__(self, row_count: _Optional[int] = ..., shows_rotation: _Optional[bool] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("handoff_id", "decode", "token_ids", "sampling", "request_id")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    decode: _handoff_pb2.Incarnation
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _prefill_pb2.SamplingState
    request_id: str
    def __init__(self, handoff_id: _Optional[bytes] = ..., decode: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_prefill_pb2.SamplingState, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("token_ids", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _prefill_pb2.FinishReason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_prefill_pb2.FinishReason, str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("decode", "token_ids", "table_length_tokens", "sampling", "request_id")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    decode: _handoff_pb2.Incarnation
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    table_length_tokens: int
    sampling: _prefill_pb2.SamplingState
    request_id: str
    def __init__(self, decode: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., table_length_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_prefill_pb2.SamplingState, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _prefill_pb2.FinishReason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_prefill_pb2.FinishReason, str]] = ...) -> None: ...
