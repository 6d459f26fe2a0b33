"""Transport offers, segments and regions from and to protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import ID_BYTES, join
from kvpact.handoff.regions import NixlRegion, ShmSegment
from kvpact.handoff.transport_choice import TransportChoice, TransportOffer
from kvpact.v1 import handoff_pb2 as pb
from kvpact.v1 import prefill_pb2


def encode_transport_offers(offers: Iterable[TransportOffer]) -> list[pb.TransportOffer]:
    """Offers as messages."""
    return [
        pb.TransportOffer(name=offer.name, available=offer.available, reason=offer.reason, agent=offer.agent)
        for offer in offers
    ]


def decode_transport_offers(messages: Iterable[pb.TransportOffer], path: str) -> tuple[TransportOffer, ...]:
    """Offers from messages; each has a name."""
    offers = []
    for index, message in enumerate(messages):
        offers.append(
            TransportOffer(
                name=fields.name(message.name, f"{path}[{index}].name"),
                available=message.available,
                reason=fields.told(message.reason),
                agent=message.agent,
            )
        )
    return tuple(offers)


def encode_segment(segment: ShmSegment) -> pb.ShmSegment:
    """A segment as a message."""
    return pb.ShmSegment(pid=segment.pid, fd=segment.fd, size_bytes=segment.size_bytes, token=segment.token)


def decode_segment(message: pb.ShmSegment, path: str) -> ShmSegment:
    """A segment from a message; what it names hasn't been looked at."""
    return ShmSegment(
        pid=fields.integer(message, "pid", path, least=1),
        fd=fields.integer(message, "fd", path, least=0),
        size_bytes=fields.integer(message, "size_bytes", path, least=ID_BYTES),
        token=fields.octets(message.token, join(path, "token"), length=ID_BYTES),
    )


def encode_nixl_region(region: NixlRegion) -> pb.NixlRegion:
    """A region as a message."""
    return pb.NixlRegion(address=region.address, size_bytes=region.size_bytes)


def decode_nixl_region(message: pb.NixlRegion, path: str) -> NixlRegion:
    """A region from a message."""
    return NixlRegion(
        address=fields.integer(message, "address", path, least=1),
        size_bytes=fields.integer(message, "size_bytes", path, least=1),
    )


def encode_choice(choice: TransportChoice | None) -> prefill_pb2.TransportChoice | None:
    """A choice as a message; None where the pair uses none."""
    return None if choice is None else prefill_pb2.TransportChoice(name=choice.name, reason=choice.reason)


def decode_choice(message: prefill_pb2.ConnectResponse) -> TransportChoice | None:
    """The choice that a prefill worker told, if it told one."""
    if not message.HasField("transport"):
        return None
    choice = message.transport
    return TransportChoice(name=fields.name(choice.name, "transport.name"), reason=fields.told(choice.reason))
