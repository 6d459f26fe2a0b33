"""Workers make themselves known here."""

from __future__ import annotations

from typing import Any

import grpc

from coordinator.fleet import HEARTBEAT_INTERVAL_S, Fleet
from coordinator.ports import RegisteredWorker
from kvpact.errors import BadRequest, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.status import answering
from kvpact.v1 import coordinator_pb2 as pb
from kvpact.v1 import coordinator_pb2_grpc


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers from the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RegisterResponse:
        """Makes one life of a worker known."""
        async with answering(context):
            self._fleet.register(_worker(request), codec.decode_load(request.load))
        return pb.RegisterResponse(heartbeat_interval=codec.encode_seconds(HEARTBEAT_INTERVAL_S))

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HeartbeatResponse:
        """Takes a sign of life."""
        async with answering(context):
            known = self._fleet.heartbeat(codec.decode_life(request.worker), codec.decode_load(request.load))
        return pb.HeartbeatResponse(register_again=not known)


class CoordinatorServer:
    """Owns the gRPC server from `start` to `stop`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Binds (0 is any port) and serves; gives host:port. Raises Unavailable if the address is taken."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = CoordinatorServicer(self._fleet)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise Unavailable(f"can't bind {host}:{port}; is another process on that port?") from error
        await server.start()
        self._server = server
        return f"{host}:{bound}"

    async def stop(self) -> None:
        """Ends running calls and closes the port. Idempotent."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


def _worker(request: pb.RegisterRequest) -> RegisteredWorker:
    if not request.endpoint:
        raise BadRequest("endpoint is empty; expected host:port", param="endpoint")
    return RegisteredWorker(
        life=codec.decode_life(request.worker),
        role=codec.decode_role(request.role),
        endpoint=request.endpoint,
        contract=codec.decode_contract(request.contract),
        pid=request.pid,
    )
