"""Transports of a worker as a deployment sets them: handoff.transport and handoff.staging_bytes."""

from __future__ import annotations

from kvpact.config import HandoffConfig
from kvpact.handoff.nixl_agent import open_agent, why_not
from kvpact.handoff.nixl_staging import Staging
from kvpact.handoff.nixl_transport import NixlWriter
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.shm_transport import ShmReader
from kvpact.handoff.transport_choice import AUTO, NIXL, SHM
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.types import WorkerLife

IN_THE_OPEN = "tls is set, and nixl writes without encryption; handoff.transport: nixl allows that"


def make_reader_transports(handoff: HandoffConfig, life: WorkerLife) -> ReaderTransports:
    """What a decode worker offers."""
    wanted = handoff.transport
    unwanted = f"its handoff.transport is {wanted}"
    problem = why_not() if wanted in (AUTO, NIXL) else unwanted

    def open_staging() -> Staging:
        return Staging(open_agent(_agent_name(life), handoff.staging_bytes))

    return ReaderTransports(
        shm=ShmReader(most_bytes=handoff.staging_bytes) if wanted in (AUTO, SHM) else None,
        without_shm=unwanted,
        open_staging=open_staging if problem is None else None,
        without_staging=problem or "",
    )


def make_writer_transports(
    handoff: HandoffConfig, life: WorkerLife, *, encrypted: bool = False
) -> WriterTransports:
    """What a prefill worker offers and asks for. `encrypted`: its connections are, and auto keeps to that."""
    wanted = handoff.transport
    problem = why_not() if wanted in (AUTO, NIXL) else f"its handoff.transport is {wanted}"
    if wanted == AUTO and encrypted:
        problem = IN_THE_OPEN

    def open_nixl() -> NixlWriter:
        return NixlWriter(open_agent(_agent_name(life), handoff.staging_bytes))

    return WriterTransports(
        wanted=wanted,
        shm_idle_bytes=handoff.staging_bytes,
        open_nixl=open_nixl if problem is None else None,
        without_nixl=problem or "",
    )


def _agent_name(life: WorkerLife) -> str:
    """Unique over processes, as agents have to be."""
    return f"{life.worker}-{life.incarnation.hex()}"
