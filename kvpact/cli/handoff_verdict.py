"""A whole verdict by its digests, asked of the decode worker that gave it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvpact.cli.worker_source import DEADLINE_S, UNKNOWN_INCARNATION, worker_security
from kvpact.contract.identity import contract_digest
from kvpact.errors import BadRequest, KvpactError, UnreadableSource
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.types import ContractDigest, Verdict, WorkerLife

DIGEST_BYTES = 32


def ask_verdict(address: str, writer: str, reader: str | None, tls: Path | None) -> Verdict:
    """The verdict that the worker at `address` gave; `reader` None: on its own contract.

    Raises:
        BadRequest: a digest that is none, or a pair that it hasn't judged.
        UnreadableSource: nobody answers there.
    """
    sides = _digest("WRITER_DIGEST", writer), None if reader is None else _digest("--reader", reader)
    try:
        return asyncio.run(_ask(address, *sides, tls))
    except BadRequest:
        raise
    except KvpactError as error:
        raise UnreadableSource(f"no decode worker answers at {address} ({error})", source=address) from error


async def _ask(
    address: str, writer: ContractDigest, reader: ContractDigest | None, tls: Path | None
) -> Verdict:
    anyone = WorkerLife(worker=address, incarnation=UNKNOWN_INCARNATION)
    port = GrpcReaderPort(address, anyone, deadline_s=DEADLINE_S, security=worker_security(tls))
    try:
        return await port.verdict(writer, reader or contract_digest((await port.describe()).contract))
    finally:
        await port.close()


def _digest(flag: str, text: str) -> ContractDigest:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != DIGEST_BYTES:
        expected = f"{2 * DIGEST_BYTES} hexadecimal digits, as refusals and `handoff show --json` have them"
        raise BadRequest(f"{flag}: found {text!r}, expected {expected}", param=flag)
    return ContractDigest(data)
