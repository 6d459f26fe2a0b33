"""What a worker is and carries, from and to protobuf."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import ID_BYTES, EnumCodec, join
from kvpact.handoff.contract_codec import decode_contract, encode_contract
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.types import BlockCounts, HandoffId, Role, WorkerCounters, WorkerLife, WorkerLoad
from kvpact.v1 import handoff_pb2 as pb

MOST_SECONDS = 30 * 86_400.0
"""No lease and no interval is longer; timers of the event loop take no more."""
REASON_CHARACTERS = 256
MOST_HOLDERS = 64
"""Kinds of holders of blocks; each is a label of a metric."""
ROLES = EnumCodec(pb.Role, "ROLE", Role)
STATES = EnumCodec(pb.HandoffState, "HANDOFF_STATE", HandoffState)


def encode_life(life: WorkerLife) -> pb.Incarnation:
    """Process life as a message."""
    return pb.Incarnation(worker=life.worker, incarnation=life.incarnation)


def decode_life(message: pb.Incarnation, path: str = "worker") -> WorkerLife:
    """Process life from a message; refuses what is no name and an incarnation that isn't 16 bytes."""
    return WorkerLife(
        worker=fields.name(message.worker, join(path, "worker")),
        incarnation=fields.octets(message.incarnation, join(path, "incarnation"), length=ID_BYTES),
    )


def decode_handoff_id(value: bytes, path: str = "handoff_id") -> HandoffId:
    """Handoff id of 16 bytes."""
    return HandoffId(fields.octets(value, path, length=ID_BYTES))


def decode_reason(value: str) -> str:
    """Why somebody gives a handoff up, fit for logs; cut, since tombstones keep it."""
    return fields.told(value[:REASON_CHARACTERS])


def decode_endpoint(value: str, path: str = "endpoint") -> str:
    """host:port under which a worker says that it serves."""
    return fields.endpoint(value, path)


def decode_pid(message: Message, path: str = "") -> int:
    """The field `pid` of a message: a process id, at least 1."""
    return fields.integer(message, "pid", path, least=1)


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
    """Seconds above 0, at most MOST_SECONDS."""
    seconds = float(duration.seconds + duration.nanos / 1e9)
    if not 0 < seconds <= MOST_SECONDS:
        raise fields.refusal(path, f"is {seconds:g} s; expected more than 0, at most {MOST_SECONDS:g}")
    return seconds


def encode_load(load: WorkerLoad) -> pb.WorkerLoad:
    """Load as a message."""
    return pb.WorkerLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        blocks=_encode_blocks(load.blocks),
        draining=load.draining,
        quarantined_staging_bytes=load.quarantined_staging_bytes,
    )


def decode_load(message: pb.WorkerLoad, path: str = "load") -> WorkerLoad:
    """Load from a message."""
    blocks_path = fields.part(message, "blocks", path)
    return WorkerLoad(
        running_requests=fields.integer(message, "running_requests", path, least=0),
        waiting_requests=fields.integer(message, "waiting_requests", path, least=0),
        blocks=_decode_blocks(message.blocks, blocks_path),
        draining=message.draining,
        quarantined_staging_bytes=fields.integer(message, "quarantined_staging_bytes", path, least=0),
    )


def _encode_blocks(counts: BlockCounts) -> pb.BlockCounts:
    held = [pb.HeldBlocks(reason=reason, count=count) for reason, count in counts.held]
    return pb.BlockCounts(free=counts.free, total=counts.total, held=held, cached=counts.cached)


def _decode_blocks(message: pb.BlockCounts, path: str) -> BlockCounts:
    if len(message.held) > MOST_HOLDERS:
        found = f"names {len(message.held)} holders; at most {MOST_HOLDERS} are taken"
        raise fields.refusal(join(path, "held"), found)
    return BlockCounts(
        free=fields.integer(message, "free", path, least=0),
        total=fields.integer(message, "total", path, least=1),
        held=tuple(
            (
                fields.name(entry.reason, f"{path}.held[{index}].reason"),
                fields.integer(entry, "count", f"{path}.held[{index}]", least=0),
            )
            for index, entry in enumerate(message.held)
        ),
        cached=fields.integer(message, "cached", path, least=0),
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
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
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
        prefix_query_tokens=count("prefix_query_tokens"),
        prefix_hit_tokens=count("prefix_hit_tokens"),
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
        pid=decode_pid(message, path),
    )
