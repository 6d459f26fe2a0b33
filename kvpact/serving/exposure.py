"""Who may face a network without encryption: nobody, unless the operator says so in as many words."""

from __future__ import annotations

import ipaddress
import logging

from kvpact.errors import BadRequest

logger = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_plaintext(key: str, host: str, *, insecure: bool, encrypted: bool = False) -> None:
    """Lets gRPC through with tls, on loopback, or where `insecure` is set, which is logged.

    Raises:
        BadRequest: `host` is reachable by others and nobody said that this is meant.
    """
    if encrypted or is_loopback(host):
        return
    if not insecure:
        raise BadRequest(
            f"{key} is {host}, which others can reach, and workers' traffic isn't encrypted; set tls "
            "(`kvpact tls init DIR` makes certificates), bind 127.0.0.1, or set insecure: true beside it if "
            "the network is yours alone",
            param=key,
        )
    logger.warning("%s is %s without encryption: whoever reaches it can use and release handoffs", key, host)


def check_advertised(key: str, host: str, advertise_host: str) -> None:
    """Refuses a worker that binds for others and tells them an address of their own machine.

    Raises:
        BadRequest: names both addresses.
    """
    if is_loopback(advertise_host) and not is_loopback(host):
        raise BadRequest(
            f"{key} is {host}, but advertise_host is {advertise_host}, where others find themselves; "
            "set advertise_host to an address of this machine",
            param=key,
        )
