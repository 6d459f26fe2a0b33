"""WorkerService: what any worker, prefill or decode, answers about itself and its handoffs."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from kvpact.handoff import codec
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.handoff.status import answering
from kvpact.types import ContractDigest, HandoffId, Verdict, WorkerLife
from kvpact.v1 import handoff_pb2 as pb
from kvpact.v1 import handoff_pb2_grpc


class WorkerFacts(Protocol):
    """What a worker gives to its WorkerService. All failures are KvpactErrors."""

    async def describe(self) -> WorkerDescription:
        """Life, contract, counters and load now."""

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """Extends a lease; seconds from now on. Raises UnknownHandoff or Fenced."""

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """Gives a handoff up at any state, running work of it included; idempotent. The state before."""

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """A verdict given at pairing. Raises BadRequest where there is none."""

    async def drain(self) -> int:
        """Takes no new work from now on; requests that still run. Idempotent."""


class WorkerService(handoff_pb2_grpc.WorkerServiceServicer):
    """Servicer over WorkerFacts."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._facts = facts

    async def Renew(
        self, request: pb.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RenewResponse:
        """Extends the lease of a handoff."""
        async with answering(context):
            life = codec.decode_life(request.worker, "worker")
            lease_s = await self._facts.renew(codec.decode_handoff_id(request.handoff_id), life)
            return pb.RenewResponse(lease=codec.encode_seconds(lease_s))

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseResponse:
        """Gives a handoff up."""
        async with answering(context):
            handoff_id = codec.decode_handoff_id(request.handoff_id)
            reason = codec.decode_reason(request.reason)
            if request.writer_stopped:
                state = await self._facts.release(handoff_id, reason, writer_stopped=True)
            else:
                state = await self._facts.release(handoff_id, reason)
            return pb.ReleaseResponse(previous_state=codec.encode_state(state))

    async def GetVerdict(
        self, request: pb.GetVerdictRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetVerdictResponse:
        """Reads a whole verdict."""
        async with answering(context):
            verdict = await self._facts.verdict(
                codec.decode_digest(request.writer_digest, "writer_digest"),
                codec.decode_digest(request.reader_digest, "reader_digest"),
            )
            return pb.GetVerdictResponse(verdict=codec.encode_verdict(verdict))

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeResponse:
        """Reads what the worker is."""
        async with answering(context):
            return codec.encode_description(await self._facts.describe())

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainResponse:
        """Stops taking new work."""
        async with answering(context):
            return pb.DrainResponse(running_requests=await self._facts.drain())


def add_worker_service(server: grpc.aio.Server, facts: WorkerFacts) -> None:
    """Adds the service, before the server starts."""
    handoff_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(facts), server)
