"""One gRPC server with the standard health service, bound to a port of its own or to an ephemeral one."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpact.errors import Unavailable

GRACE_S = 5.0


class WorkerServer:
    """Owns a gRPC server from `start` to `stop`."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
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
        try:
            bound = self._server.add_insecure_port(f"{bind}:{port}")
        except RuntimeError as error:
            raise Unavailable(f"can't bind {bind}:{port}; is another process on that port?") from error
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return f"{advertise_host}:{bound}"

    async def stop(self) -> None:
        """Takes no new calls, gives running ones GRACE_S seconds, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(GRACE_S)
