"""PrefillService: a prefiller and its partners behind gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from kvpact.handoff import codec
from kvpact.handoff.jobs import Paired, PrefillEvent
from kvpact.handoff.status import answering
from kvpact.v1 import prefill_pb2 as pb
from kvpact.v1 import prefill_pb2_grpc
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
            connection = await self._partners.connect(codec.decode_connect(request))
            assert connection.verdict is not None, "connect gives a verdict or raises"
            paired = Paired(
                verdict=connection.verdict, canary=connection.canary, transport=connection.transport
            )
            return codec.encode_paired(paired)

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillResponse]:
        """Computes a prompt and hands its cache over."""
        async with answering(context), contextlib.aclosing(self._events(request)) as events:
            async for event in events:
                yield codec.encode_prefill_event(event)

    def _events(self, request: pb.PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        return self._prefiller.prefill(codec.decode_prefill_job(request))


def add_prefill_service(server: grpc.aio.Server, prefiller: Prefiller, partners: Partners) -> None:
    """Adds the service, before the server starts."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(prefiller, partners), server)
