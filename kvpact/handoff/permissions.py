"""Which role may make which call: the one table, and the questions that servers ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvpact.errors import NotPermitted
from kvpact.tls import PeerRole
from kvpact.types import Role

_PREFILL, _DECODE = PeerRole.PREFILL, PeerRole.DECODE
_COORDINATOR, _ADMIN = PeerRole.COORDINATOR, PeerRole.ADMIN
_EVERY_ROLE = frozenset(PeerRole)

CALLERS: dict[str, frozenset[PeerRole]] = {
    "/kvpact.v1.DecodeService/Pair": frozenset({_PREFILL}),
    "/kvpact.v1.DecodeService/Reserve": frozenset({_PREFILL}),
    "/kvpact.v1.DecodeService/Push": frozenset({_PREFILL}),
    "/kvpact.v1.DecodeService/Decode": frozenset({_COORDINATOR}),
    "/kvpact.v1.DecodeService/Generate": frozenset({_COORDINATOR}),
    "/kvpact.v1.PrefillService/Connect": frozenset({_COORDINATOR}),
    "/kvpact.v1.PrefillService/Prefill": frozenset({_COORDINATOR}),
    "/kvpact.v1.CoordinatorService/Register": frozenset({_PREFILL, _DECODE}),
    "/kvpact.v1.CoordinatorService/Heartbeat": frozenset({_PREFILL, _DECODE}),
    "/kvpact.v1.WorkerService/Renew": frozenset({_PREFILL, _COORDINATOR}),
    "/kvpact.v1.WorkerService/Release": frozenset({_PREFILL, _COORDINATOR}),
    "/kvpact.v1.WorkerService/GetVerdict": _EVERY_ROLE,
    "/kvpact.v1.WorkerService/Describe": _EVERY_ROLE,
    "/kvpact.v1.WorkerService/Drain": frozenset({_COORDINATOR, _ADMIN}),
}
"""Roles that may make each call. A call that isn't listed is nobody's."""

ANYBODY = ("/grpc.health.v1.Health/",)
"""Services for every certificate that a server accepts, whatever role it gives."""


def check_caller(method: str, names: Iterable[str]) -> None:
    """Lets a call through whose caller's certificate holds the name of a role that may make it.

    Raises:
        NotPermitted: names the call, the names found and the names expected.
    """
    if method.startswith(ANYBODY):
        return
    found = frozenset(names)
    expected = [role.dns_name() for role in PeerRole if role in CALLERS.get(method, ())]
    if not found.isdisjoint(expected):
        return
    raise _refusal(method, found, " or ".join(expected) or "no certificate at all")


def check_announced(method: str, names: Iterable[str], role: Role) -> None:
    """Lets a worker announce itself only as what its certificate says it is.

    Raises:
        NotPermitted: it says that it is another.
    """
    found, expected = frozenset(names), PeerRole(role.value).dns_name()
    if expected not in found:
        raise _refusal(f"{method} of a {role} worker", found, expected)


def _refusal(call: str, found: Set[str], expected: str) -> NotPermitted:
    names = ", ".join(sorted(found)) or "no name"
    return NotPermitted(
        f"{call} isn't for a certificate with {names}; expected {expected}", method=call, names=names
    )
