"""Which transport a pair uses, and why."""

from __future__ import annotations

import pytest

from kvpact.errors import Unavailable
from kvpact.handoff.transport_choice import TransportOffer, choose


def offer(name: str, available: bool = True, reason: str = "tried") -> TransportOffer:
    return TransportOffer(name=name, available=available, reason=reason)


BOTH = (offer("shm"), offer("nixl"))


def test_auto_takes_the_fastest_that_both_have() -> None:
    assert choose("auto", BOTH, BOTH).name == "shm"
    assert choose("auto", BOTH, (offer("shm", False, "another host"), offer("nixl"))).name == "nixl"
    assert choose("auto", (offer("shm", False, "no Linux"),), BOTH).name == "grpc"
    assert choose("auto", (), ()).name == "grpc"


def test_the_reason_says_what_was_proved_and_what_was_passed_over() -> None:
    assert choose("auto", BOTH, (offer("shm", reason="read its token"),)).reason == "read its token"
    passed_over = choose("auto", (offer("shm"),), (offer("shm", False, "another host"), offer("nixl"))).reason
    assert "shm isn't used: decode side: another host" in passed_over
    assert "nixl isn't used: the prefill side doesn't know it" in passed_over


@pytest.mark.parametrize("name", ["grpc", "shm", "nixl"])
def test_a_transport_that_is_asked_for_is_taken_though_a_faster_one_works(name: str) -> None:
    assert choose(name, BOTH, BOTH).name == name


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        ((offer("shm"),), (offer("shm", False, "other user"),), "decode side: other user"),
        ((offer("shm", False, "no Linux"),), (offer("shm"),), "prefill side: no Linux"),
        ((offer("shm"),), (), "the decode side doesn't know it"),
    ],
)
def test_a_transport_that_is_asked_for_and_does_not_work_is_refused_with_the_reason(
    writer: tuple[TransportOffer, ...], reader: tuple[TransportOffer, ...], why: str
) -> None:
    with pytest.raises(Unavailable, match=f"handoff.transport is shm.*{why}.*handoff.transport: auto"):
        choose("shm", writer, reader)
