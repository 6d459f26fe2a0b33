"""What can be known wrong before Ray or a model is started: address, context and both sides' contracts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpact.config import Config
from kvpact.contract.contract import Contract
from kvpact.contract.sources.cache_choice import from_config
from kvpact.contract.sources.huggingface import contract_from_config, override_config, read_config
from kvpact.errors import BadRequest, Unavailable, UnreadableSource
from kvpact.handoff.capture_folder import check_capture
from kvpact.tls import PeerRole, TlsConfig
from kvpact.types import Dtype, Role


def check_address(host: str, port: int) -> None:
    """Binds the HTTP side's address for a moment.

    Raises:
        BadRequest: no address of this machine.
        Unavailable: the port is taken, or isn't this user's to take.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if error.errno == errno.EADDRINUSE else "needs more rights"
            raise Unavailable(
                f"--port (api.port): {host}:{port} {why}; choose another, or 0 for any that is free"
            ) from error
        raise BadRequest(
            f"--host (api.host): {host} is no address of this machine ({error.strerror}); "
            "expected one such as 127.0.0.1",
            param="api.host",
        ) from error


def check_files(config: Config, *, joined: bool = False) -> None:
    """Certificates, and the folder for captures where workers run here. Raises BadRequest."""
    check_certificates(config.tls, joined=joined)
    if not joined:
        check_capture(config.handoff.capture)


def check_certificates(tls: TlsConfig, *, joined: bool = False) -> None:
    """Reads the certificates of a cluster's processes: in one that is joined, workers' lie on other machines.

    Raises:
        BadRequest: one can't be used; names file and reason.
    """
    from kvpact.handoff.security_transport import make_security

    for role in (PeerRole.COORDINATOR, *(() if joined else (PeerRole.PREFILL, PeerRole.DECODE))):
        make_security(tls, role)


def side_contracts(config: Config, folder: Path) -> dict[Role, Contract]:
    """Both sides' contracts from the model's config.json, with cache, overrides and context as set.

    Raises:
        UnreadableSource: the model's own config.json can't be served.
        BadRequest: max_model_len exceeds the context, or an override is unknown or has a wrong value.
    """
    given = read_config(folder)
    return {
        Role.PREFILL: _contract(config, given, Role.PREFILL),
        Role.DECODE: _contract(config, given, Role.DECODE),
    }


def _contract(config: Config, given: Mapping[str, Any], role: Role) -> Contract:
    side = config.prefill if role is Role.PREFILL else config.decode
    cache, dtype = from_config(side.cache), config.engine.compute_dtype or Dtype.FLOAT32
    try:
        changed = override_config(given, side.override)
        contract = contract_from_config(changed, cache=cache, compute_dtype=dtype)
    except (BadRequest, UnreadableSource) as error:
        if not side.override:
            raise
        if isinstance(error, UnreadableSource):
            contract_from_config(given, cache=cache)
        raise BadRequest(f"--{role}-override ({role}.override): {error}", param=f"{role}.override") from error
    if config.max_model_len is None:
        return contract
    try:
        return contract_from_config(
            changed, cache=cache, compute_dtype=dtype, context_tokens=config.max_model_len
        )
    except BadRequest as error:
        raise BadRequest(f"--max-model-len ({role} side): {error}", param="max_model_len") from error
