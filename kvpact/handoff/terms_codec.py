"""Terms and reservations from and to protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import DIGEST_BYTES, ID_BYTES, join
from kvpact.handoff.contract_codec import decode_contract, decode_table, encode_contract, encode_table
from kvpact.handoff.messages import (
    Adapter,
    GroupTable,
    HandoffTerms,
    PairAnswer,
    PairOffer,
    RequiredPositions,
    Reservation,
)
from kvpact.handoff.transport_choice import GRPC
from kvpact.handoff.transport_codec import (
    decode_nixl_region,
    decode_segment,
    decode_transport_offers,
    encode_nixl_region,
    encode_segment,
    encode_transport_offers,
)
from kvpact.handoff.verdict_codec import decode_digest, decode_verdict, encode_verdict
from kvpact.handoff.worker_codec import (
    decode_handoff_id,
    decode_life,
    decode_seconds,
    encode_life,
    encode_seconds,
)
from kvpact.types import PositionRun
from kvpact.v1 import decode_pb2
from kvpact.v1 import handoff_pb2 as pb


def encode_offer(offer: PairOffer) -> decode_pb2.PairRequest:
    """Offer of a contract."""
    return decode_pb2.PairRequest(
        schema_major=offer.schema_major,
        contract_digest=offer.contract_digest,
        writer=encode_life(offer.writer),
        reader=encode_life(offer.reader),
        contract=offer.contract,
        shm_trial=None if offer.shm_trial is None else encode_segment(offer.shm_trial),
    )


def decode_offer(message: decode_pb2.PairRequest) -> PairOffer:
    """Offer of a contract; the body stays serialised."""
    return PairOffer(
        schema_major=fields.integer(message, "schema_major", "", least=1),
        contract_digest=decode_digest(message.contract_digest, "contract_digest"),
        writer=decode_life(message.writer, fields.part(message, "writer", "")),
        reader=decode_life(message.reader, fields.part(message, "reader", "")),
        contract=message.contract,
        shm_trial=decode_segment(message.shm_trial, "shm_trial") if message.HasField("shm_trial") else None,
    )


def encode_answer(answer: PairAnswer) -> decode_pb2.PairResponse:
    """Verdict and the reader's contract."""
    return decode_pb2.PairResponse(
        verdict=encode_verdict(answer.verdict),
        reader_contract=encode_contract(answer.reader_contract),
        transports=encode_transport_offers(answer.transports),
    )


def decode_answer(message: decode_pb2.PairResponse) -> PairAnswer:
    """Verdict and the reader's contract, checked."""
    return PairAnswer(
        verdict=decode_verdict(message.verdict, fields.part(message, "verdict", "")),
        reader_contract=decode_contract(message.reader_contract, fields.part(message, "reader_contract", "")),
        transports=decode_transport_offers(message.transports, "transports"),
    )


def encode_reserve(terms: HandoffTerms, max_output_tokens: int) -> decode_pb2.ReserveRequest:
    """Request for room."""
    return decode_pb2.ReserveRequest(
        terms=encode_terms(terms),
        max_output_tokens=max_output_tokens,
        transport="" if terms.transport == GRPC else terms.transport,
    )


def decode_reserve(message: decode_pb2.ReserveRequest) -> tuple[HandoffTerms, int]:
    """Terms and the number of output tokens that will be asked."""
    terms = decode_terms(message.terms, fields.part(message, "terms", ""))
    if message.transport:
        terms = replace(terms, transport=fields.name(message.transport, "transport"))
    return terms, fields.integer(message, "max_output_tokens", "", least=1)


def encode_terms(terms: HandoffTerms) -> pb.HandoffTerms:
    """Terms as a message."""
    adapter = terms.adapter
    return pb.HandoffTerms(
        handoff_id=terms.handoff_id,
        writer=encode_life(terms.writer),
        reader=encode_life(terms.reader),
        contract_digest=terms.contract_digest,
        token_ids=terms.token_ids,
        token_digest=terms.token_digest,
        positions=[
            pb.PositionRun(start=run.start, count_tokens=run.count, slot_start=run.slot_start)
            for run in terms.positions
        ],
        next_position=terms.next_position,
        table_length_tokens=terms.table_length,
        tables=[
            pb.GroupTable(group=entry.group, table=None if entry.table is None else encode_table(entry.table))
            for entry in terms.tables
        ],
        adapter=None if adapter is None else _encode_adapter(adapter),
        required=[
            pb.RequiredPositions(group=entry.group, start=entry.start, end=entry.end)
            for entry in terms.required
        ],
        canary=terms.canary,
    )


def decode_terms(message: pb.HandoffTerms, path: str = "terms") -> HandoffTerms:
    """Terms from a message.

    Raises:
        BadRequest: a field is unset, or a number is out of its range; `param` is its path.
    """
    return HandoffTerms(
        handoff_id=decode_handoff_id(message.handoff_id, join(path, "handoff_id")),
        writer=decode_life(message.writer, fields.part(message, "writer", path)),
        reader=decode_life(message.reader, fields.part(message, "reader", path)),
        contract_digest=decode_digest(message.contract_digest, join(path, "contract_digest")),
        token_ids=decode_tokens(message.token_ids, join(path, "token_ids")),
        token_digest=fields.octets(message.token_digest, join(path, "token_digest"), length=DIGEST_BYTES),
        positions=tuple(
            _decode_run(run, f"{path}.positions[{index}]") for index, run in enumerate(message.positions)
        ),
        next_position=fields.integer(message, "next_position", path, least=0),
        table_length=fields.integer(message, "table_length_tokens", path, least=1),
        tables=tuple(
            _decode_group_table(entry, f"{path}.tables[{index}]")
            for index, entry in enumerate(message.tables)
        ),
        adapter=_decode_adapter(message.adapter, join(path, "adapter"))
        if message.HasField("adapter")
        else None,
        required=tuple(
            _decode_required(entry, f"{path}.required[{index}]")
            for index, entry in enumerate(message.required)
        ),
        canary=message.canary,
    )


def decode_tokens(token_ids: Iterable[int], path: str) -> tuple[int, ...]:
    """Token ids, at least one, each at least 0."""
    tokens = tuple(token_ids)
    if not tokens:
        raise fields.refusal(path, "is empty")
    if min(tokens) < 0:
        raise fields.refusal(path, f"holds {min(tokens)}; token ids count from 0")
    return tokens


def encode_reservation(reservation: Reservation) -> pb.Reservation:
    """Grant as a message."""
    return pb.Reservation(
        handoff_id=reservation.handoff_id,
        generation=reservation.generation,
        lease=encode_seconds(reservation.lease_s),
        held_prefix_tokens=reservation.held_prefix_tokens,
        chunk_cap_bytes=reservation.chunk_cap_bytes,
        transports=reservation.transports,
        nonce=reservation.nonce,
        nixl=None if reservation.nixl is None else encode_nixl_region(reservation.nixl),
    )


def decode_reservation(message: pb.Reservation, path: str = "reservation") -> Reservation:
    """Grant from a message."""
    return Reservation(
        handoff_id=decode_handoff_id(message.handoff_id, join(path, "handoff_id")),
        generation=fields.integer(message, "generation", path, least=1),
        lease_s=decode_seconds(message.lease, fields.part(message, "lease", path)),
        held_prefix_tokens=fields.integer(message, "held_prefix_tokens", path, least=0),
        chunk_cap_bytes=fields.integer(message, "chunk_cap_bytes", path, least=1),
        transports=tuple(message.transports),
        nonce=fields.octets(message.nonce, join(path, "nonce"), length=ID_BYTES),
        nixl=decode_nixl_region(message.nixl, join(path, "nixl")) if message.HasField("nixl") else None,
    )


def _encode_adapter(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(
        weights_digest=adapter.weights_digest,
        rank=adapter.rank,
        alpha=adapter.alpha,
        scale=adapter.scale,
        targets=adapter.targets,
    )


def _decode_adapter(message: pb.Adapter, path: str) -> Adapter:
    return Adapter(
        weights_digest=fields.octets(
            message.weights_digest, join(path, "weights_digest"), length=DIGEST_BYTES
        ),
        rank=fields.integer(message, "rank", path, least=1),
        alpha=fields.number(message, "alpha", path, positive=False),
        scale=fields.number(message, "scale", path, positive=False),
        targets=tuple(message.targets),
    )


def _decode_run(message: pb.PositionRun, path: str) -> PositionRun:
    return PositionRun(
        start=fields.integer(message, "start", path, least=0),
        count=fields.integer(message, "count_tokens", path, least=1),
        slot_start=fields.optional_integer(message, "slot_start", path, least=0),
    )


def _decode_group_table(message: pb.GroupTable, path: str) -> GroupTable:
    table = decode_table(message.table, join(path, "table")) if message.HasField("table") else None
    return GroupTable(group=fields.integer(message, "group", path, least=0), table=table)


def _decode_required(message: pb.RequiredPositions, path: str) -> RequiredPositions:
    return RequiredPositions(
        group=fields.integer(message, "group", path, least=0),
        start=fields.integer(message, "start", path, least=0),
        end=fields.integer(message, "end", path, least=1),
    )
