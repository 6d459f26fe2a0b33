"""What any worker is on the outside: one gRPC server with its services, and a place at the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import grpc

from kvpact.config import RoleConfig
from kvpact.contract.identity import contract_digest
from kvpact.handoff.messages import WorkerDescription
from kvpact.handoff.security_transport import Security
from kvpact.handoff.service import WorkerFacts, WorkerService
from kvpact.serving.addresses import settled_host
from kvpact.serving.exposure import check_advertised, check_plaintext
from kvpact.serving.registration_transport import Registrar
from kvpact.serving.server_transport import WorkerServer
from kvpact.v1 import handoff_pb2_grpc

logger = logging.getLogger(__name__)

OBSTACLE_CAP = 2000
"""Characters of it that are logged."""


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
        security: Security,
    ) -> None:
        self._facts = facts
        self._security = security
        self._role = role
        self._coordinator = coordinator
        self._add_service = add_service
        self._server: WorkerServer | None = None
        self._registrar: Registrar | None = None
        self._obstacle: str | None = None
        """Why no request can reach it, as it was told last; None: not told yet."""
        self._left = False

    async def start(self) -> str:
        """Serves, then registers where there is a coordinator; advertised host:port.

        Raises:
            BadRequest: others could reach it, and that isn't said to be meant.
            Unavailable: the address can't be bound.
        """
        role = self._role
        self._check_exposure()
        server = WorkerServer(self._security)
        server.add(self._add_service)
        service = WorkerService(self._facts)
        server.add(lambda to: handoff_pb2_grpc.add_WorkerServiceServicer_to_server(service, to))
        host = settled_host(role.advertise_host)
        endpoint = await server.start(bind=role.bind, port=role.port, advertise_host=host)
        self._server = server
        description = self._facts.description()
        digest = contract_digest(description.contract).hex()
        logger.info("%s serves at %s with contract %s", description.life.worker, endpoint, digest)
        if self._coordinator is None:
            await server.set_ready(True)
        else:
            self._registrar = Registrar(
                coordinator=self._coordinator,
                life=description.life,
                role=description.role,
                endpoint=endpoint,
                contract=description.contract,
                load=lambda: self._facts.description().load,
                counters=lambda: self._facts.description().counters,
                security=self._security,
                on_obstacle=self._note_obstacle,
            )
            self._registrar.start()
        return endpoint

    async def leave(self) -> None:
        """Tells health checks that it isn't for new work any more; what it has goes on. Idempotent."""
        self._left = True
        if self._server is not None:
            await self._server.set_ready(False)

    async def announce(self) -> None:
        """Tells the coordinator at once what the worker carries; returns when it knows or doesn't answer."""
        if self._registrar is not None:
            await self._registrar.beat()

    async def stop(self) -> None:
        """Ends announcing, then serving. Idempotent."""
        if self._registrar is not None:
            await self._registrar.stop()
            self._registrar = None
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def _note_obstacle(self, obstacle: str) -> None:
        """Readiness follows what the coordinator says, and the log has each change."""
        if self._left or self._server is None:
            return
        if obstacle and obstacle != self._obstacle:
            logger.warning("not ready: %s", obstacle[:OBSTACLE_CAP])
        elif not obstacle and obstacle != self._obstacle:
            logger.info("ready: requests can reach this worker")
        self._obstacle = obstacle
        await self._server.set_ready(not obstacle)

    def _check_exposure(self) -> None:
        """Raises BadRequest where plaintext would leave this machine and that isn't said to be meant."""
        role, encrypted = self._role, self._security.encrypted
        check_plaintext("bind", role.bind, insecure=role.insecure, encrypted=encrypted)
        check_advertised("bind", role.bind, role.advertise_host)
        if self._coordinator is not None:
            host = self._coordinator.rpartition(":")[0].strip("[]")
            where = "the coordinator's address"
            check_plaintext(where, host, insecure=role.insecure, encrypted=encrypted)
