"""One full value of each kind that crosses the wire, and the codec that carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kvpact.contract.contract import (
    AttentionTemperature,
    Contract,
    FrequencyFormula,
    LatentDims,
    Quantization,
    RotaryTable,
    Schema,
)
from kvpact.handoff import codec
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.jobs import DecodedTokens, DecodeJob
from kvpact.handoff.messages import (
    Adapter,
    CanaryOutcome,
    Chunk,
    ChunkHeader,
    Commit,
    CommitReceipt,
    HandoffTerms,
    Open,
    PairAnswer,
    PairOffer,
    PushPart,
    RequiredPositions,
    Reservation,
    Witness,
    WitnessReport,
    WorkerDescription,
)
from kvpact.handoff.regions import NixlRegion, ShmSegment
from kvpact.handoff.terms import make_terms
from kvpact.handoff.transport_choice import TransportOffer
from kvpact.types import (
    BlockCounts,
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    FinishReason,
    FrequencyPolicy,
    IdentityRelation,
    KeyState,
    LayerKind,
    PlanOp,
    PlanStep,
    PositionRun,
    QuantizationGranularity,
    QuantizationScheme,
    Relation,
    Role,
    Sampling,
    ScaleSource,
    Verdict,
    VerdictWord,
    WorkerCounters,
    WorkerLife,
    WorkerLoad,
)
from kvpact.v1 import contract_pb2, decode_pb2, handoff_pb2, prefill_pb2
from tests.factories import make_contract, make_group, make_rotary
from tests.handoff_fakes import READER, WRITER, make_handoff_id

WRITER_DIGEST = ContractDigest(b"a" * 32)
READER_DIGEST = ContractDigest(b"b" * 32)
SAMPLING = Sampling(max_output_tokens=9, stop_token_ids=frozenset({2, 0}), ignore_eos=True)

SEGMENT = ShmSegment(pid=7, fd=3, size_bytes=1 << 40, token=b"t" * 16)


def full_contract() -> Contract:
    """Every field of a contract that isn't always empty is set somewhere."""
    tables = (
        RotaryTable(inv_freq=(1.0, 0.5), amplitude=1.0, upper_length=32),
        RotaryTable(inv_freq=(0.75, 0.25), amplitude=1.25),
    )
    by_length = replace(
        make_rotary(rotary_dim=4),
        tables=tables,
        frequency_policy=FrequencyPolicy.BY_REQUEST_LENGTH,
        formula=FrequencyFormula(name="dynamic_ntk", parameters=(8.0, 32.0)),
        mrope_sections=(1, 1),
        mrope_interleaved=True,
    )
    groups = (
        replace(
            make_group(layers=(0, 3), key_dim=8, value_dim=4, rotary=by_length),
            softcap=50.0,
            sinks=True,
            temperature=AttentionTemperature(formula="llama4_log1p", parameters=(0.1, 8192.0)),
        ),
        make_group(
            layers=(1,), kind=LayerKind.SLIDING, window=8, key_dim=4, rotary=make_rotary(rotary_dim=4)
        ),
        replace(
            make_group(layers=(2,), kind=LayerKind.MLA_LATENT, rotary=make_rotary(key_state=KeyState.NONE)),
            latent=LatentDims(latent_dim=12, rope_dim=4, content_first=True),
        ),
    )
    contract = make_contract(layer_groups=groups, name="tiny")
    quantization = Quantization(
        scheme=QuantizationScheme.SYMMETRIC,
        granularity=QuantizationGranularity.TENSOR,
        scale_source=ScaleSource.FIXED,
        fixed_scales=(0.5, 0.25, 0.125, 0.0625),
    )
    return replace(
        contract,
        schema=Schema(major=1, minor=2, required_features=("sinks",)),
        model=replace(contract.model, revision="r1", engine="engine 1"),
        layout=replace(contract.layout, key_quantization=quantization),
    )


def full_verdict() -> Verdict:
    """A refusal with two differences and, for the codec's sake, a plan."""
    return Verdict(
        word=VerdictWord.REJECT,
        identity=IdentityRelation.DIFFERENT,
        differences=(
            Difference(
                field="inv_freq",
                layers=(0, 1),
                writer="[1] 0.5",
                reader="[1] 0.25",
                relation=Relation.INCOMPATIBLE,
                action=DifferenceAction.REJECT,
                remedy="serve both with one rope_theta",
                explanation="a key lands at another angle",
            ),
            Difference(
                field="block_size",
                layers=(),
                writer="16",
                reader="24",
                relation=Relation.CONVERTIBLE,
                action=DifferenceAction.CONVERT,
                remedy="",
            ),
        ),
        plan=(
            PlanStep(op=PlanOp.UNROTATE, exactness=Exactness.ROUNDING, bound_epsilons=4.0),
            PlanStep(op=PlanOp.REBLOCK, exactness=Exactness.BIT_EXACT),
        ),
        exactness=Exactness.ROUNDING,
        writer_digest=WRITER_DIGEST,
        reader_digest=READER_DIGEST,
    )


def full_terms() -> HandoffTerms:
    """Terms with every field set, whether a reader would take them or not."""
    plain = make_terms(
        handoff_id=make_handoff_id(),
        writer=WRITER,
        reader=READER,
        contract=full_contract(),
        contract_digest=WRITER_DIGEST,
        token_ids=(0, 5, 3),
        table_length=40,
    )
    adapter = Adapter(weights_digest=b"l" * 32, rank=8, alpha=16.0, scale=2.0, targets=("k_proj", "q_proj"))
    return replace(
        plain,
        positions=(PositionRun(start=0, count=2), PositionRun(start=2, count=1, slot_start=5)),
        adapter=adapter,
        required=(RequiredPositions(group=0, start=0, end=3), RequiredPositions(group=1, start=1, end=3)),
    )


def full_chunk() -> Chunk:
    """A chunk with a true checksum."""
    header = ChunkHeader(
        handoff_id=make_handoff_id(),
        generation=3,
        sequence=0,
        layer=0,
        block_start=0,
        block_count=2,
        key_bytes=5,
        value_bytes=3,
    )
    keys, values = b"\x00\x01\x02\x03\x04", b"\xfd\xfe\xff"
    checksum = chunk_checksum(header, WRITER_DIGEST, b"t" * 32, keys, values)
    return Chunk(header=header, checksum=checksum, keys=keys, values=values)


class Sample(NamedTuple):
    """A value with its way to bytes and back."""

    value: Any
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


def _sample(value: object, kind: Any, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Sample:
    return Sample(
        value,
        lambda given: bytes(encode(given).SerializeToString(deterministic=True)),
        lambda data: decode(kind.FromString(data)),
    )


def _push(part: PushPart) -> Sample:
    return Sample(part, codec.push_to_bytes, codec.push_from_bytes)


LOAD = WorkerLoad(running_requests=1, waiting_requests=2, blocks=BlockCounts(free=3, total=4), draining=True)
SHARING_LOAD = replace(
    LOAD, blocks=BlockCounts(free=3, total=6, held=(("handoff", 1), ("sequence", 3)), cached=2)
)
COUNTERS = WorkerCounters(
    computed_prompt_tokens=1,
    computed_output_tokens=2,
    forward_steps=3,
    committed_handoffs=4,
    failed_handoffs=5,
    handoff_bytes=6,
)
SHARING_COUNTERS = replace(COUNTERS, prefix_query_tokens=70, prefix_hit_tokens=48)
SAMPLES = {
    "contract": _sample(full_contract(), contract_pb2.Contract, codec.encode_contract, codec.decode_contract),
    "verdict": _sample(full_verdict(), contract_pb2.Verdict, codec.encode_verdict, codec.decode_verdict),
    "life": _sample(WRITER, handoff_pb2.Incarnation, codec.encode_life, codec.decode_life),
    "load": _sample(LOAD, handoff_pb2.WorkerLoad, codec.encode_load, codec.decode_load),
    "counters": _sample(COUNTERS, handoff_pb2.WorkerCounters, codec.encode_counters, codec.decode_counters),
    "load_of_shared_blocks": _sample(
        SHARING_LOAD, handoff_pb2.WorkerLoad, codec.encode_load, codec.decode_load
    ),
    "counters_of_prefixes": _sample(
        SHARING_COUNTERS, handoff_pb2.WorkerCounters, codec.encode_counters, codec.decode_counters
    ),
    "description": _sample(
        WorkerDescription(
            life=READER, role=Role.DECODE, contract=make_contract(), counters=COUNTERS, load=LOAD, pid=7
        ),
        handoff_pb2.DescribeResponse,
        codec.encode_description,
        codec.decode_description,
    ),
    "offer": _sample(
        PairOffer(
            schema_major=1,
            contract_digest=WRITER_DIGEST,
            writer=WRITER,
            reader=READER,
            contract=codec.contract_to_bytes(make_contract()),
        ),
        decode_pb2.PairRequest,
        codec.encode_offer,
        codec.decode_offer,
    ),
    "answer": _sample(
        PairAnswer(verdict=full_verdict(), reader_contract=make_contract()),
        decode_pb2.PairResponse,
        codec.encode_answer,
        codec.decode_answer,
    ),
    "offer_with_trial": _sample(
        PairOffer(
            schema_major=1,
            contract_digest=WRITER_DIGEST,
            writer=WRITER,
            reader=READER,
            contract=b"c",
            shm_trial=SEGMENT,
        ),
        decode_pb2.PairRequest,
        codec.encode_offer,
        codec.decode_offer,
    ),
    "answer_with_transports": _sample(
        PairAnswer(
            verdict=full_verdict(),
            reader_contract=make_contract(),
            transports=(
                TransportOffer(name="shm", available=False, reason="another host"),
                TransportOffer(name="nixl", available=True, reason="", agent=b"agent"),
            ),
        ),
        decode_pb2.PairResponse,
        codec.encode_answer,
        codec.decode_answer,
    ),
    "open_of_a_segment": _push(
        Open(handoff_id=make_handoff_id(), generation=3, contract_digest=WRITER_DIGEST, shm=SEGMENT)
    ),
    "chunk_in_a_region": _push(replace(full_chunk(), keys=b"", values=b"", region_offset=64)),
    "load_in_quarantine": _sample(
        replace(LOAD, quarantined_staging_bytes=1 << 40),
        handoff_pb2.WorkerLoad,
        codec.encode_load,
        codec.decode_load,
    ),
    "terms_of_canary": _sample(
        replace(full_terms(), canary=True), handoff_pb2.HandoffTerms, codec.encode_terms, codec.decode_terms
    ),
    "terms": _sample(full_terms(), handoff_pb2.HandoffTerms, codec.encode_terms, codec.decode_terms),
    "reservation": _sample(
        Reservation(
            handoff_id=make_handoff_id(),
            generation=3,
            lease_s=30.5,
            held_prefix_tokens=16,
            chunk_cap_bytes=1 << 20,
            transports=("shm", "grpc"),
            nonce=b"n" * 16,
        ),
        handoff_pb2.Reservation,
        codec.encode_reservation,
        codec.decode_reservation,
    ),
    "reservation_in_staging": _sample(
        Reservation(
            handoff_id=make_handoff_id(),
            generation=3,
            lease_s=30.5,
            held_prefix_tokens=0,
            chunk_cap_bytes=16 << 20,
            transports=("nixl", "grpc"),
            nonce=b"n" * 16,
            nixl=NixlRegion(address=1 << 46, size_bytes=4096),
        ),
        handoff_pb2.Reservation,
        codec.encode_reservation,
        codec.decode_reservation,
    ),
    "open": _push(Open(handoff_id=make_handoff_id(), generation=3, contract_digest=WRITER_DIGEST)),
    "chunk": _push(full_chunk()),
    "commit": _push(
        Commit(
            chunk_count=2,
            payload_bytes=16,
            first_token_id=0,
            first_token_logprob=-0.5,
            witnesses=(Witness(layer=0, position=2, raw_key=b"r", attended_key=b"k", value=b"v"),),
        )
    ),
    "commit_of_a_cached_prefix": _push(
        Commit(chunk_count=2, payload_bytes=16, first_token_id=7, first_computed_tokens=16)
    ),
    "receipt": _sample(
        CommitReceipt(exactness=Exactness.LOSSY, max_abs_error=0.0, plan=full_verdict().plan),
        decode_pb2.PushResponse,
        codec.encode_receipt,
        codec.decode_receipt,
    ),
    "receipt_of_canary": _sample(
        CommitReceipt(
            exactness=Exactness.ROUNDING,
            max_abs_error=None,
            plan=(),
            witnesses=WitnessReport(row_count=6, shows_rotation=True),
            canary=CanaryOutcome(
                passed=False, max_abs_error=float("inf"), tolerance=0.0, finding="witness of layer 0"
            ),
        ),
        decode_pb2.PushResponse,
        codec.encode_receipt,
        codec.decode_receipt,
    ),
    "sampling": _sample(
        (SAMPLING, 3),
        prefill_pb2.SamplingState,
        lambda pair: codec.encode_sampling(pair[0], original_prompt_tokens=pair[1]),
        codec.decode_sampling,
    ),
    "decode_job": _sample(
        DecodeJob(
            handoff_id=make_handoff_id(),
            decode=WorkerLife(worker="decode-0", incarnation=b"r" * 16),
            token_ids=(0, 5, 3, 7),
            sampling=SAMPLING,
            original_prompt_tokens=3,
            request_id="cmpl-1",
        ),
        decode_pb2.DecodeRequest,
        codec.encode_decode_job,
        codec.decode_decode_job,
    ),
    "decoded_tokens": _sample(
        DecodedTokens(token_ids=(0, 7), finish_reason=FinishReason.STOP),
        decode_pb2.DecodeResponse,
        codec.encode_decoded_tokens,
        codec.decode_decoded_tokens,
    ),
}
