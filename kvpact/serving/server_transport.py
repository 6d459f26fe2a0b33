"""One gRPC server with the standard health service, bound to a port of its own or to an ephemeral one."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpact.handoff.security_transport import PLAINTEXT, Security

GRACE_S = 5.0
READY = "kvpact.ready"
"""Name under which the health service tells readiness; the empty name tells that the process lives."""


class WorkerServer:
    """Owns a gRPC server from `start` to `stop`."""

    def __init__(self, security: Security = PLAINTEXT) -> None:
        self._security = security
        self._server = security.make_server([("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Adds a service, before `start`."""
        register(self._server)

    async def start(self, *, bind: str, port: int, advertise_host: str) -> str:
        """Binds, serves and gives the advertised host:port.

        Raises:
            Unavailable: the address can't be bound.
        """
        bound = self._security.bind(self._server, f"{bind}:{port}")
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        return f"{advertise_host}:{bound}"

    async def set_ready(self, ready: bool) -> None:
        """Tells health checks whether it is for new work; it answers either way."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(READY, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self) -> None:
        """Takes no new calls, gives running ones GRACE_S seconds, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(GRACE_S)
