"""PrefillService: a prefiller and its partners behind gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from kvpact.errors import BadRequest
from kvpact.handoff import codec
from kvpact.handoff.status import answering
from kvpact.handoff.verdict_codec import EXACTNESSES
from kvpact.v1 import handoff_pb2, prefill_pb2_grpc
from kvpact.v1 import prefill_pb2 as pb
from prefill_worker.jobs import Committed, FirstToken, Partner, PrefillEvent, PrefillJob, Reserved
from prefill_worker.partners import Partners
from prefill_worker.prefiller import Prefiller


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Servicer of one prefill worker."""

    def __init__(self, prefiller: Prefiller, partners: Partners) -> None:
        self._prefiller = prefiller
        self._partners = partners

    async def Connect(
        self, request: pb.ConnectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ConnectResponse:
        """Pairs this worker with a decode worker and probes the pair."""
        async with answering(context):
            partner = _partner(request.decode, request.decode_endpoint)
            paired = await self._partners.connect(partner)
            assert paired.verdict is not None, "connect gives a verdict or raises"
            return pb.ConnectResponse(
                verdict=codec.encode_verdict(paired.verdict), canary=codec.encode_canary(paired.canary)
            )

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillResponse]:
        """Computes a prompt and hands its cache over."""
        async with answering(context), contextlib.aclosing(self._events(request)) as events:
            async for event in events:
                yield _encode(event)

    def _events(self, request: pb.PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        return self._prefiller.prefill(_job(request))


def _partner(life: handoff_pb2.Incarnation, endpoint: str) -> Partner:
    if not endpoint:
        raise BadRequest("decode_endpoint is empty; expected host:port", param="decode_endpoint")
    return Partner(life=codec.decode_life(life, "decode"), endpoint=endpoint)


def _job(request: pb.PrefillRequest) -> PrefillJob:
    sampling, original_prompt_tokens = codec.decode_sampling(request.sampling)
    token_ids = codec.decode_tokens(request.token_ids, "token_ids")
    if original_prompt_tokens > len(token_ids):
        raise BadRequest(
            f"sampling.original_prompt_tokens is {original_prompt_tokens}; token_ids holds {len(token_ids)}",
            param="sampling.original_prompt_tokens",
        )
    if request.table_length_tokens < len(token_ids):
        raise BadRequest(
            f"table_length_tokens is {request.table_length_tokens}; token_ids holds {len(token_ids)}",
            param="table_length_tokens",
        )
    return PrefillJob(
        handoff_id=codec.decode_handoff_id(request.handoff_id),
        prefill=codec.decode_life(request.prefill, "prefill"),
        decode=_partner(request.decode, request.decode_endpoint) if request.HasField("decode") else None,
        token_ids=token_ids,
        original_prompt_tokens=original_prompt_tokens,
        table_length=request.table_length_tokens,
        sampling=sampling,
        request_id=request.request_id,
    )


def _encode(event: PrefillEvent) -> pb.PrefillResponse:
    match event:
        case Reserved():
            return pb.PrefillResponse(reserved=pb.ReservedEvent(held_prefix_tokens=event.held_prefix_tokens))
        case Committed():
            committed = pb.CommittedEvent(
                payload_bytes=event.payload_bytes,
                exactness=EXACTNESSES.encode(event.receipt.exactness),
                max_abs_error=event.receipt.max_abs_error,
                handoff_s=event.handoff_s,
                exposed_s=event.exposed_s,
            )
            return pb.PrefillResponse(committed=committed)
        case FirstToken():
            finish_reason = codec.encode_finish_reason(event.finish_reason)
            return pb.PrefillResponse(
                first_token=pb.FirstTokenEvent(token_id=event.token_id, finish_reason=finish_reason)
            )


def add_prefill_service(server: grpc.aio.Server, prefiller: Prefiller, partners: Partners) -> None:
    """Adds the service, before the server starts."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(prefiller, partners), server)
