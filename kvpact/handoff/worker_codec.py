"""What a worker is and carries, from and to protobuf."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import ID_BYTES, EnumCodec, join
from kvpact.handoff.contract_codec import decode_contract, encode_contract
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.types import BlockCounts, HandoffId, Role, WorkerCounters, WorkerLife, WorkerLoad
from kvpact.v1 import handoff_pb2 as pb

ROLES = EnumCodec(pb.Role, "ROLE", Role)
STATES = EnumCodec(pb.HandoffState, "HANDOFF_STATE", HandoffState)


def encode_life(life: WorkerLife) -> pb.Incarnation:
    """Process life as a message."""
    return pb.Incarnation(worker=life.worker, incarnation=life.incarnation)


def decode_life(message: pb.Incarnation, path: str = "worker") -> WorkerLife:
    """Process life from a message; refuses an empty name and an incarnation that isn't 16 bytes."""
    return WorkerLife(
        worker=fields.text(message.worker, join(path, "worker")),
        incarnation=fields.octets(message.incarnation, join(path, "incarnation"), length=ID_BYTES),
    )


def decode_handoff_id(value: bytes, path: str = "handoff_id") -> HandoffId:
    """Handoff id of 16 bytes."""
    return HandoffId(fields.octets(value, path, length=ID_BYTES))


def encode_role(role: Role) -> pb.Role:
    """Role as a number."""
    return ROLES.encode(role)


def decode_role(number: int, path: str = "role") -> Role:
    """Role from a number; refuses UNSPECIFIED."""
    return ROLES.decode(number, path)


def encode_state(state: HandoffState | None) -> pb.HandoffState:
    """State as a number; UNSPECIFIED for a handoff that was never known."""
    return STATES.encode_optional(state)


def decode_state(number: int, path: str = "previous_state") -> HandoffState | None:
    """State from a number; None for UNSPECIFIED."""
    return STATES.decode_optional(number, path)


def encode_seconds(seconds: float) -> Duration:
    """Seconds as a Duration, to the microsecond."""
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def decode_seconds(duration: Duration, path: str) -> float:
    """Seconds above 0."""
    seconds = float(duration.seconds + duration.nanos / 1e9)
    if seconds <= 0:
        raise fields.refusal(path, f"is {seconds:g} s; expected more than 0")
    return seconds


def encode_load(load: WorkerLoad) -> pb.WorkerLoad:
    """Load as a message."""
    return pb.WorkerLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        blocks=pb.BlockCounts(free=load.blocks.free, total=load.blocks.total),
        draining=load.draining,
    )


def decode_load(message: pb.WorkerLoad, path: str = "load") -> WorkerLoad:
    """Load from a message."""
    blocks_path = fields.part(message, "blocks", path)
    return WorkerLoad(
        running_requests=fields.integer(message, "running_requests", path, least=0),
        waiting_requests=fields.integer(message, "waiting_requests", path, least=0),
        blocks=BlockCounts(
            free=fields.integer(message.blocks, "free", blocks_path, least=0),
            total=fields.integer(message.blocks, "total", blocks_path, least=1),
        ),
        draining=message.draining,
    )


def encode_counters(counters: WorkerCounters) -> pb.WorkerCounters:
    """Counters as a message."""
    return pb.WorkerCounters(
        computed_prompt_tokens=counters.computed_prompt_tokens,
        computed_output_tokens=counters.computed_output_tokens,
        forward_steps=counters.forward_steps,
        committed_handoffs=counters.committed_handoffs,
        failed_handoffs=counters.failed_handoffs,
        handoff_bytes=counters.handoff_bytes,
    )


def decode_counters(message: pb.WorkerCounters, path: str = "counters") -> WorkerCounters:
    """Counters from a message; each at least 0."""

    def count(field: str) -> int:
        return fields.integer(message, field, path, least=0)

    return WorkerCounters(
        computed_prompt_tokens=count("computed_prompt_tokens"),
        computed_output_tokens=count("computed_output_tokens"),
        forward_steps=count("forward_steps"),
        committed_handoffs=count("committed_handoffs"),
        failed_handoffs=count("failed_handoffs"),
        handoff_bytes=count("handoff_bytes"),
    )


def encode_description(description: WorkerDescription) -> pb.DescribeResponse:
    """Answer of Describe."""
    return pb.DescribeResponse(
        worker=encode_life(description.life),
        role=encode_role(description.role),
        contract=encode_contract(description.contract),
        counters=encode_counters(description.counters),
        load=encode_load(description.load),
        pid=description.pid,
    )


def decode_description(message: pb.DescribeResponse, path: str = "description") -> WorkerDescription:
    """Answer of Describe, checked."""
    return WorkerDescription(
        life=decode_life(message.worker, fields.part(message, "worker", path)),
        role=decode_role(message.role, join(path, "role")),
        contract=decode_contract(message.contract, fields.part(message, "contract", path)),
        counters=decode_counters(message.counters, fields.part(message, "counters", path)),
        load=decode_load(message.load, fields.part(message, "load", path)),
        pid=fields.integer(message, "pid", path, least=1),
    )
