"""The contract of a running worker, asked for over the network."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from kvpact.errors import KvpactError, UnreadableSource

if TYPE_CHECKING:
    from kvpact.handoff.messages import WorkerDescription

ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d{1,5}")
DEADLINE_S = 5.0
UNKNOWN_INCARNATION = bytes(16)


def is_address(text: str) -> bool:
    """Whether a source is written as host:port."""
    return ADDRESS.fullmatch(text) is not None


def describe_worker(address: str) -> WorkerDescription:
    """What the worker at `address` says of itself.

    Raises:
        UnreadableSource: nobody answers there, or something that is no worker of this release.
    """
    try:
        return asyncio.run(_describe(address))
    except ImportError as error:
        raise UnreadableSource(
            f"{address}: asking a worker needs gRPC; run: pip install grpcio grpcio-status ({error})",
            source=address,
        ) from error
    except KvpactError as error:
        raise UnreadableSource(
            f"no worker answers at {address} ({error}); give the address that `kvpact up` or the worker's log"
            " prints, or the contract file, model folder or config.json of that side",
            source=address,
        ) from error


async def _describe(address: str) -> WorkerDescription:
    from kvpact.handoff.grpc_transport import GrpcReaderPort
    from kvpact.types import WorkerLife

    anyone = WorkerLife(worker=address, incarnation=UNKNOWN_INCARNATION)
    port = GrpcReaderPort(address, anyone, deadline_s=DEADLINE_S)
    try:
        return await port.describe()
    finally:
        await port.close()
