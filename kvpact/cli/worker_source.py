"""The contract of a running worker, asked for over the network."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvpact.errors import BadRequest, KvpactError, Unavailable, UnreadableSource

if TYPE_CHECKING:
    from kvpact.handoff.messages import WorkerDescription
    from kvpact.handoff.security_transport import Security
    from kvpact.tls import PeerRole

ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d{1,5}")
DEADLINE_S = 5.0
UNKNOWN_INCARNATION = bytes(16)


def is_address(text: str) -> bool:
    """Whether a source is written as host:port."""
    return ADDRESS.fullmatch(text) is not None


def describe_worker(address: str, tls: Path | None = None) -> WorkerDescription:
    """What the worker at `address` says of itself, asked with the admin certificate of the folder `tls`.

    Without a folder the environment's certificates are used (KVPACT_TLS__DIRECTORY); without any, plaintext.

    Raises:
        BadRequest: the certificates can't be used.
        UnreadableSource: nobody answers there, or something that is no worker of this release.
    """
    try:
        return asyncio.run(_describe(address, worker_security(tls)))
    except ImportError as error:
        raise UnreadableSource(
            f"{address}: asking a worker needs gRPC; run: pip install grpcio grpcio-status ({error})",
            source=address,
        ) from error
    except BadRequest:
        raise
    except KvpactError as error:
        raise UnreadableSource(
            f"no worker answers at {address} ({error}); give the address that `kvpact up` or the worker's log"
            " prints, or the contract file, model folder or config.json of that side",
            source=address,
        ) from error


def worker_security(tls: Path | None) -> Security:
    """Certificates of the folder `tls`, else the environment's, else none."""
    from kvpact.config import load_config
    from kvpact.handoff.security_transport import make_security
    from kvpact.tls import PeerRole

    settings = load_config(None, {} if tls is None else {"tls": {"directory": tls}})
    return make_security(settings.tls, PeerRole.ADMIN)


async def _describe(address: str, security: Security) -> WorkerDescription:
    """Asks a decode worker, and where certificates tell the two apart, then a prefill worker."""
    from kvpact.tls import PeerRole

    try:
        return await _ask(address, security, PeerRole.DECODE)
    except Unavailable:
        if not security.encrypted:
            raise
        return await _ask(address, security, PeerRole.PREFILL)


async def _ask(address: str, security: Security, server: PeerRole) -> WorkerDescription:
    from kvpact.handoff.grpc_transport import GrpcReaderPort
    from kvpact.types import WorkerLife

    anyone = WorkerLife(worker=address, incarnation=UNKNOWN_INCARNATION)
    port = GrpcReaderPort(address, anyone, deadline_s=DEADLINE_S, security=security, server=server)
    try:
        return await port.describe()
    finally:
        await port.close()
