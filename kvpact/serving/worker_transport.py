"""What any worker is on the outside: one gRPC server with its services, and a place at the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc

from kvpact.config import RoleConfig
from kvpact.handoff.messages import WorkerDescription
from kvpact.handoff.service import WorkerFacts, WorkerService
from kvpact.serving.exposure import check_advertised, check_plaintext
from kvpact.serving.registration_transport import Registrar
from kvpact.serving.server_transport import WorkerServer
from kvpact.v1 import handoff_pb2_grpc


class ServedFacts(WorkerFacts, Protocol):
    """WorkerFacts of a worker that can describe itself at once."""

    def description(self) -> WorkerDescription:
        """Life, contract, counters and load now."""


class WorkerFront:
    """Serves and announces one worker from `start` to `stop`."""

    def __init__(
        self,
        *,
        facts: ServedFacts,
        role: RoleConfig,
        add_service: Callable[[grpc.aio.Server], None],
        coordinator: str | None,
    ) -> None:
        self._facts = facts
        self._role = role
        self._coordinator = coordinator
        self._add_service = add_service
        self._server: WorkerServer | None = None
        self._registrar: Registrar | None = None

    async def start(self) -> str:
        """Serves, then registers where there is a coordinator; advertised host:port.

        Raises:
            BadRequest: others could reach it, and that isn't said to be meant.
            Unavailable: the address can't be bound.
        """
        role = self._role
        check_plaintext("bind", role.bind, insecure=role.insecure)
        check_advertised("bind", role.bind, role.advertise_host)
        server = WorkerServer()
        server.add(self._add_service)
        service = WorkerService(self._facts)
        server.add(lambda to: handoff_pb2_grpc.add_WorkerServiceServicer_to_server(service, to))
        endpoint = await server.start(bind=role.bind, port=role.port, advertise_host=role.advertise_host)
        self._server = server
        if self._coordinator is not None:
            description = self._facts.description()
            self._registrar = Registrar(
                coordinator=self._coordinator,
                life=description.life,
                role=description.role,
                endpoint=endpoint,
                contract=description.contract,
                load=lambda: self._facts.description().load,
            )
            self._registrar.start()
        return endpoint

    async def stop(self) -> None:
        """Ends announcing, then serving. Idempotent."""
        if self._registrar is not None:
            await self._registrar.stop()
            self._registrar = None
        if self._server is not None:
            await self._server.stop()
            self._server = None
