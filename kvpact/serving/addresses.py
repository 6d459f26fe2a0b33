"""Under which address other machines reach this one."""

from __future__ import annotations

import socket

from kvpact.errors import Unavailable

AUTO = "auto"
ELSEWHERE = ("10.255.255.255", 9)
"""Some address of another machine: connecting a datagram socket picks a route and sends nothing."""


def settled_host(advertise_host: str) -> str:
    """`advertise_host` itself; for `auto` the address of this machine's interface towards others.

    Raises:
        Unavailable: this machine has no route to others.
    """
    if advertise_host != AUTO:
        return advertise_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError as error:
            raise Unavailable(
                f"advertise_host is auto, but this machine has no route to others ({error.strerror}); "
                "name its address"
            ) from error
        host: str = probe.getsockname()[0]
        return host
