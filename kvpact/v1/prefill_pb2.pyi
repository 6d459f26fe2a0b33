from kvpact.v1 import contract_pb2 as _contract_pb2
from kvpact.v1 import handoff_pb2 as _handoff_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class ConnectRequest(_message.Message):
    __slots__ = ("decode_endpoint", "decode")
    DECODE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    decode_endpoint: str
    decode: _handoff_pb2.Incarnation
    def __init__(self, decode_endpoint: _Optional[str] = ..., decode: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("verdict", "canary", "transport")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    verdict: _contract_pb2.Verdict
    canary: CanaryResult
    transport: TransportChoice
    def __init__(self, verdict: _Optional[_Union[_contract_pb2.Verdict, _Mapping]] = ..., canary: _Optional[_Union[CanaryResult, _Mapping]] = ..., transport: _Optional[_Union[TransportChoice, _Mapping]] = ...) -> None: ...

class TransportChoice(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CanaryResult(_message.Message):
    __slots__ = ("ran", "passed", "max_abs_error", "tolerance", "finding")
    RAN_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    ran: bool
    passed: bool
    max_abs_error: float
    tolerance: float
    finding: str
    def __init__(self, ran: _Optional[bool] = ..., passed: _Optional[bool] = ..., max_abs_error: _Optional[float] = ..., tolerance: _Optional[float] = ..., finding: _Optional[str] = ...) -> None: ...

class SamplingState(_message.Message):
    __slots__ = ("temperature", "stop_token_ids", "ignore_eos", "max_output_tokens", "seed", "choice", "original_prompt_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    max_output_tokens: int
    seed: int
    choice: int
    original_prompt_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., max_output_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., original_prompt_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("handoff_id", "prefill", "decode", "decode_endpoint", "token_ids", "table_length_tokens", "sampling", "request_id")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    prefill: _handoff_pb2.Incarnation
    decode: _handoff_pb2.Incarnation
    decode_endpoint: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    table_length_tokens: int
    sampling: SamplingState
    request_id: str
    def __init__(self, handoff_id: _Optional[bytes] = ..., prefill: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., decode: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., decode_endpoint: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., table_length_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingState, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("reserved", "first_token", "committed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    reserved: ReservedEvent
    first_token: FirstTokenEvent
    committed: CommittedEvent
    def __init__(self, reserved: _Optional[_Union[ReservedEvent, _Mapping]] = ..., first_token: _Optional[_Union[FirstTokenEvent, _Mapping]] = ..., committed: _Optional[_Union[CommittedEvent, _Mapping]] = ...) -> None: ...

class ReservedEvent(_message.Message):
    __slots__ = ("held_prefix_tokens",)
    HELD_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_prefix_tokens: int
    def __init__(self, held_prefix_tokens: _Optional[int] = ...) -> None: ...

class FirstTokenEvent(_message.Message):
    __slots__ = ("token_id", "finish_reason")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finish_reason: FinishReason
    def __init__(self, token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class CommittedEvent(_message.Message):
    __slots__ = ("payload_bytes", "exactness", "max_abs_error", "handoff_s", "exposed_s")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_ERROR_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    exactness: _contract_pb2.Exactness
    max_abs_error: float
    handoff_s: float
    exposed_s: float
    def __init__(self, payload_bytes: _Optional[int] = ..., exactness: _Optional[_Union[_contract_pb2.Exactness, str]] = ..., max_abs_error: _Optional[float] = ..., handoff_s: _Optional[float] = ..., exposed_s: _Optional[float] = ...) -> None: ...
