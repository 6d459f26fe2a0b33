"""Starts Ray here or joins a cluster of it, quietly; what keeps it from that is told in our words."""

from __future__ import annotations

import logging
import socket
from typing import Any

from kvpact.errors import BadRequest, Unavailable

CONNECT_S = 5.0
"""Ray itself tries for minutes before it says that nobody answers."""
RAY_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"


def init_ray(*, address: str, **options: Any) -> None:
    """Connects this process to Ray at `address`; `local` starts it. `options` are ray.init's own.

    Raises:
        BadRequest: `address` isn't one.
        Unavailable: no Ray answers there, or one of another version of Ray or Python.
    """
    import ray

    logging.getLogger(RAY_TOKEN_LOGGER).addFilter(_worth_saying)
    _check_reachable(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **options,
        )
    except ConnectionError as error:
        raise Unavailable(f"there is no Ray cluster at {address}: {error}") from error
    except RuntimeError as error:
        raise Unavailable(f"can't use Ray at {address}: {error}") from error
    except ValueError as error:
        raise BadRequest(f"--address: {error}; expected auto or host:port", param="--address") from error


def _worth_saying(record: logging.LogRecord) -> bool:
    """False for Ray's word that it protects the cluster: true of every local one, and nothing to do."""
    return not record.getMessage().startswith("Token authentication is enabled")


def _check_reachable(address: str) -> None:
    """Raises Unavailable where `address` is a host:port at which nobody listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"there is no Ray cluster at {address}: {error}") from error
