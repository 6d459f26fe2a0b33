import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvpact.v1 import contract_pb2 as _contract_pb2
from kvpact.v1 import handoff_pb2 as _handoff_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "role", "endpoint", "contract", "load", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: _handoff_pb2.Incarnation
    role: _handoff_pb2.Role
    endpoint: str
    contract: _contract_pb2.Contract
    load: _handoff_pb2.WorkerLoad
    pid: int
    def __init__(self, worker: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., role: _Optional[_Union[_handoff_pb2.Role, str]] = ..., endpoint: _Optional[str] = ..., contract: _Optional[_Union[_contract_pb2.Contract, _Mapping]] = ..., load: _Optional[_Union[_handoff_pb2.WorkerLoad, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_interval",)
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "load", "counters")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    worker: _handoff_pb2.Incarnation
    load: _handoff_pb2.WorkerLoad
    counters: _handoff_pb2.WorkerCounters
    def __init__(self, worker: _Optional[_Union[_handoff_pb2.Incarnation, _Mapping]] = ..., load: _Optional[_Union[_handoff_pb2.WorkerLoad, _Mapping]] = ..., counters: _Optional[_Union[_handoff_pb2.WorkerCounters, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("register_again", "obstacle")
    REGISTER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    register_again: bool
    obstacle: str
    def __init__(self, register_again: _Optional[bool] = ..., obstacle: _Optional[str] = ...) -> None: ...
