"""Workers make themselves known here."""

from __future__ import annotations

from typing import Any

import grpc

from coordinator.fleet import HEARTBEAT_INTERVAL_S, Fleet
from coordinator.ports import RegisteredWorker
from kvpact.handoff import codec
from kvpact.handoff.guard_transport import peer_names
from kvpact.handoff.permissions import check_announced
from kvpact.handoff.security_transport import Security
from kvpact.handoff.status import answering
from kvpact.types import WorkerLoad
from kvpact.v1 import coordinator_pb2 as pb
from kvpact.v1 import coordinator_pb2_grpc


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers from the fleet."""

    def __init__(self, fleet: Fleet, *, named_callers: bool) -> None:
        """`named_callers`: connections show certificates, and workers are held to them."""
        self._fleet = fleet
        self._named_callers = named_callers

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RegisterResponse:
        """Makes one life of a worker known."""
        async with answering(context):
            worker, load = registration_of(request)
            if self._named_callers:
                check_announced("Register", peer_names(context), worker.role)
            self._fleet.register(worker, load)
        return pb.RegisterResponse(heartbeat_interval=codec.encode_seconds(HEARTBEAT_INTERVAL_S))

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HeartbeatResponse:
        """Takes a sign of life."""
        async with answering(context):
            life = codec.decode_life(request.worker)
            role = self._fleet.role_of(life)
            if self._named_callers and role is not None:
                check_announced("Heartbeat", peer_names(context), role)
            counters = codec.decode_counters(request.counters)
            known = self._fleet.heartbeat(life, codec.decode_load(request.load), counters)
            obstacle = self._fleet.obstacle(life) if known else ""
        return pb.HeartbeatResponse(register_again=not known, obstacle=obstacle)


class CoordinatorServer:
    """Owns the gRPC server from `start` to `stop`."""

    def __init__(self, fleet: Fleet, security: Security) -> None:
        self._fleet = fleet
        self._security = security
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Binds (0 is any port) and serves; gives host:port. Raises Unavailable if the address is taken."""
        server = self._security.make_server([("grpc.so_reuseport", 0)])
        servicer = CoordinatorServicer(self._fleet, named_callers=self._security.encrypted)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
        bound = self._security.bind(server, f"{host}:{port}")
        await server.start()
        self._server = server
        return f"{host}:{bound}"

    async def stop(self) -> None:
        """Ends running calls and closes the port. Idempotent."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


def registration_of(request: pb.RegisterRequest) -> tuple[RegisteredWorker, WorkerLoad]:
    """A worker and its load, checked. Raises BadRequest that names the field."""
    worker = RegisteredWorker(
        life=codec.decode_life(request.worker),
        role=codec.decode_role(request.role),
        endpoint=codec.decode_endpoint(request.endpoint),
        contract=codec.decode_contract(request.contract),
        pid=codec.decode_pid(request),
    )
    return worker, codec.decode_load(request.load)
