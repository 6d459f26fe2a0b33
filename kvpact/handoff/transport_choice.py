"""Which transport a pair uses: a choice between what both sides offer, with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpact.errors import Unavailable

GRPC, SHM, NIXL = "grpc", "shm", "nixl"
AUTO = "auto"
PREFERRED = (SHM, NIXL, GRPC)
"""Fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """What one side of a pair says of a transport."""

    name: str
    available: bool
    reason: str
    """Why it isn't, or how it was proved."""
    agent: bytes = b""
    """What the other side's agent needs to reach this one; nixl only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """How payloads of a pair travel, and why."""

    name: str
    reason: str


ALWAYS_GRPC = TransportOffer(name=GRPC, available=True, reason="payloads travel in the messages")


def choose(
    wanted: str, writer: Iterable[TransportOffer], reader: Iterable[TransportOffer]
) -> TransportChoice:
    """The transport of a pair: the one that is wanted, or for auto the fastest that both sides have.

    Raises:
        Unavailable: the wanted one doesn't work between the two; says on which side and why.
    """
    ours = {offer.name: offer for offer in (*writer, ALWAYS_GRPC)}
    theirs = {offer.name: offer for offer in (*reader, ALWAYS_GRPC)}
    if wanted != AUTO:
        problem = _problem(wanted, ours, theirs)
        if problem is None:
            return TransportChoice(name=wanted, reason="handoff.transport asks for it")
        raise Unavailable(
            f"handoff.transport is {wanted}, which doesn't work between these two: {problem}; "
            "mend that, or set handoff.transport: auto"
        )
    passed_over: list[str] = []
    for name in PREFERRED:
        problem = _problem(name, ours, theirs)
        if problem is None:
            why = theirs[name].reason if name != GRPC else ALWAYS_GRPC.reason
            return TransportChoice(name=name, reason="; ".join((why, *passed_over)))
        passed_over.append(f"{name} isn't used: {problem}")
    raise AssertionError("grpc is always there")


def _problem(name: str, ours: dict[str, TransportOffer], theirs: dict[str, TransportOffer]) -> str | None:
    """Why a transport can't be used; None where it can."""
    for side, offers in (("prefill", ours), ("decode", theirs)):
        offer = offers.get(name)
        if offer is None:
            return f"the {side} side doesn't know it"
        if not offer.available:
            return f"{side} side: {offer.reason}"
    return None
