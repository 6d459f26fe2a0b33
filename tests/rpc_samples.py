"""One message for each request and response of each rpc, with every field that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from kvpact.handoff import codec
from kvpact.handoff.jobs import Committed, FirstToken, GenerateJob, Paired, Partner, PrefillJob, Reserved
from kvpact.handoff.messages import CanaryOutcome, HandoffState, Open
from kvpact.handoff.regions import NixlRegion, ShmSegment
from kvpact.handoff.transport_choice import TransportChoice, TransportOffer
from kvpact.types import BlockCounts, Exactness, FinishReason, Role
from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2
from tests.factories import make_contract
from tests.handoff_fakes import READER, WRITER, make_handoff_id
from tests.handoff_samples import (
    COUNTERS,
    LOAD,
    READER_DIGEST,
    SAMPLES,
    SAMPLING,
    WRITER_DIGEST,
    Sample,
    full_chunk,
    full_verdict,
)

SEGMENT = ShmSegment(pid=11, fd=12, size_bytes=4096, token=b"s" * 16)
BUSY = replace(
    LOAD,
    blocks=BlockCounts(free=3, total=9, held=(("handoff", 2), ("sequence", 4)), cached=1),
    quarantined_staging_bytes=13,
)
COUNTED = replace(COUNTERS, prefix_query_tokens=7, prefix_hit_tokens=8)
PARTNER = Partner(life=READER, endpoint="127.0.0.1:9000")
PROBED = CanaryOutcome(passed=True, max_abs_error=0.25, tolerance=0.5, finding="a finding")
PREFILL = PrefillJob(
    handoff_id=make_handoff_id(),
    prefill=WRITER,
    decode=PARTNER,
    token_ids=(0, 5, 3),
    original_prompt_tokens=3,
    table_length=40,
    sampling=SAMPLING,
    request_id="cmpl-1",
)
GENERATE = GenerateJob(
    decode=READER,
    token_ids=(0, 5, 3),
    original_prompt_tokens=3,
    table_length=40,
    sampling=SAMPLING,
    request_id="cmpl-1",
)
EVENTS = (
    Reserved(held_prefix_tokens=16),
    FirstToken(token_id=0, finish_reason=FinishReason.STOP),
    Committed(payload_bytes=8, exactness=Exactness.LOSSY, handoff_s=0.5, exposed_s=0.25, max_abs_error=0.125),
)


def _value(name: str, **more: Any) -> Any:
    """The value of a sample with more of its fields."""
    return replace(SAMPLES[name].value, **more)


def _decode_service() -> dict[str, Message]:
    tokens = SAMPLES["decoded_tokens"].value
    offers = (
        TransportOffer(name="nixl", available=False, reason="no staging", agent=b"agent"),
        TransportOffer(name="grpc", available=True, reason="always"),
    )
    reserve = codec.encode_reserve(_value("terms_of_canary", transport="shm"), 8)
    reservation = codec.encode_reservation(
        _value("reservation", nixl=NixlRegion(address=1 << 40, size_bytes=4096))
    )
    parts = {
        "open": Open(handoff_id=make_handoff_id(), generation=3, contract_digest=WRITER_DIGEST, shm=SEGMENT),
        "chunk": full_chunk(),
        "chunk with scales": replace(
            full_chunk(), header=replace(full_chunk().header, key_scales=(0.5,), value_scales=(0.25, 2.0))
        ),
        "chunk in a region": replace(full_chunk(), keys=b"", values=b"", region_offset=0),
        "commit": _value("commit", first_computed_tokens=16),
    }
    receipt = codec.encode_receipt(
        replace(SAMPLES["receipt_of_canary"].value, max_abs_error=0.25, plan=full_verdict().plan)
    )
    pushes = {
        f"DecodeService.Push request: {name}": decode_pb2.PushRequest.FromString(codec.push_to_bytes(part))
        for name, part in parts.items()
    }
    return pushes | {
        "DecodeService.Pair request": codec.encode_offer(_value("offer", shm_trial=SEGMENT)),
        "DecodeService.Pair response": codec.encode_answer(_value("answer", transports=offers)),
        "DecodeService.Reserve request": reserve,
        "DecodeService.Reserve response": decode_pb2.ReserveResponse(reservation=reservation),
        "DecodeService.Push response": receipt,
        "DecodeService.Decode request": codec.encode_decode_job(SAMPLES["decode_job"].value),
        "DecodeService.Decode response": codec.encode_decoded_tokens(tokens),
        "DecodeService.Generate request": codec.encode_generate_job(GENERATE),
        "DecodeService.Generate response": codec.encode_generated_tokens(tokens),
    }


def _prefill_service() -> dict[str, Message]:
    paired = Paired(
        verdict=full_verdict(), canary=PROBED, transport=TransportChoice(name="shm", reason="one host")
    )
    events = {
        f"PrefillService.Prefill response: {type(event).__name__}": codec.encode_prefill_event(event)
        for event in EVENTS
    }
    return events | {
        "PrefillService.Connect request": codec.encode_connect(PARTNER),
        "PrefillService.Connect response": codec.encode_paired(paired),
        "PrefillService.Prefill request": codec.encode_prefill_job(PREFILL),
    }


def _worker_service() -> dict[str, Message]:
    handoff_id, life = make_handoff_id(), codec.encode_life(READER)
    described = codec.encode_description(_value("description", load=BUSY, counters=COUNTED))
    return {
        "WorkerService.Renew request": handoff_pb2.RenewRequest(handoff_id=handoff_id, worker=life),
        "WorkerService.Renew response": handoff_pb2.RenewResponse(lease=codec.encode_seconds(30.5)),
        "WorkerService.Release request": handoff_pb2.ReleaseRequest(
            handoff_id=handoff_id, reason="given up", writer_stopped=True
        ),
        "WorkerService.Release response": handoff_pb2.ReleaseResponse(
            previous_state=codec.encode_state(HandoffState.COMMITTED)
        ),
        "WorkerService.GetVerdict request": handoff_pb2.GetVerdictRequest(
            writer_digest=WRITER_DIGEST, reader_digest=READER_DIGEST
        ),
        "WorkerService.GetVerdict response": handoff_pb2.GetVerdictResponse(
            verdict=codec.encode_verdict(full_verdict())
        ),
        "WorkerService.Describe request": handoff_pb2.DescribeRequest(),
        "WorkerService.Describe response": described,
        "WorkerService.Drain request": handoff_pb2.DrainRequest(),
        "WorkerService.Drain response": handoff_pb2.DrainResponse(running_requests=3),
    }


def _coordinator_service() -> dict[str, Message]:
    life, load = codec.encode_life(READER), codec.encode_load(BUSY)
    return {
        "CoordinatorService.Register request": coordinator_pb2.RegisterRequest(
            worker=life,
            role=codec.encode_role(Role.DECODE),
            endpoint="127.0.0.1:9000",
            contract=codec.encode_contract(make_contract()),
            load=load,
            pid=7,
        ),
        "CoordinatorService.Register response": coordinator_pb2.RegisterResponse(
            heartbeat_interval=codec.encode_seconds(2.5)
        ),
        "CoordinatorService.Heartbeat request": coordinator_pb2.HeartbeatRequest(
            worker=life, load=load, counters=codec.encode_counters(COUNTED)
        ),
        "CoordinatorService.Heartbeat response": coordinator_pb2.HeartbeatResponse(
            register_again=True, obstacle="no decode worker"
        ),
    }


RPCS = _decode_service() | _prefill_service() | _worker_service() | _coordinator_service()
"""By service, rpc and direction; where a message holds one of several, by that one too."""


def _job(name: str, value: Any, encode: Any, decode: Any) -> tuple[str, Sample]:
    kind = type(RPCS[name])
    return name, Sample(
        value,
        lambda given: bytes(encode(given).SerializeToString()),
        lambda data: decode(kind.FromString(data)),
    )


JOBS = dict(
    (
        _job("PrefillService.Connect request", PARTNER, codec.encode_connect, codec.decode_connect),
        _job("PrefillService.Prefill request", PREFILL, codec.encode_prefill_job, codec.decode_prefill_job),
        _job(
            "DecodeService.Generate request", GENERATE, codec.encode_generate_job, codec.decode_generate_job
        ),
        *(
            _job(
                f"PrefillService.Prefill response: {type(event).__name__}",
                event,
                codec.encode_prefill_event,
                codec.decode_prefill_event,
            )
            for event in EVENTS
        ),
    )
)
"""Values that a codec of jobs carries there and back."""
