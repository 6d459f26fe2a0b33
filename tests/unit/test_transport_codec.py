"""What writer and reader say of transports survives the wire, and what is unset is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.errors import BadRequest
from kvpact.handoff import codec
from kvpact.handoff.jobs import Paired
from kvpact.handoff.transport_choice import TransportChoice
from kvpact.handoff.transport_codec import decode_nixl_region, decode_segment, decode_transport_offers
from kvpact.v1 import handoff_pb2 as pb
from tests.handoff_samples import full_terms, full_verdict

SEGMENT = {"pid": 7, "fd": 3, "size_bytes": 4096, "token": b"t" * 16}


@pytest.mark.parametrize("transport", ["grpc", "shm", "nixl"])
def test_the_transport_that_is_asked_for_survives_the_wire(transport: str) -> None:
    terms = replace(full_terms(), transport=transport)
    assert codec.decode_reserve(codec.encode_reserve(terms, 3)) == (terms, 3)


def test_a_request_that_asks_for_none_means_grpc() -> None:
    request = codec.encode_reserve(full_terms(), 3)
    assert request.transport == ""
    assert codec.decode_reserve(request)[0].transport == "grpc"


@pytest.mark.parametrize("transport", [None, TransportChoice(name="shm", reason="read its token")])
def test_the_choice_of_a_pair_survives_the_wire(transport: TransportChoice | None) -> None:
    paired = Paired(verdict=full_verdict(), transport=transport)
    assert codec.decode_paired(codec.encode_paired(paired)) == paired


@pytest.mark.parametrize("field", ["pid", "size_bytes", "token"])
def test_a_segment_without_a_field_is_refused(field: str) -> None:
    decode_segment(pb.ShmSegment(**SEGMENT), "shm")
    with pytest.raises(BadRequest, match=f"shm.{field}"):
        decode_segment(pb.ShmSegment(**{key: value for key, value in SEGMENT.items() if key != field}), "shm")


@pytest.mark.parametrize("changes", [{"pid": -1}, {"fd": -1}, {"size_bytes": 15}, {"token": b"short"}])
def test_a_segment_of_impossible_numbers_is_refused(changes: dict[str, object]) -> None:
    (field,) = changes
    with pytest.raises(BadRequest, match=f"shm.{field}"):
        decode_segment(pb.ShmSegment(**SEGMENT | changes), "shm")


@pytest.mark.parametrize("changes", [{"address": 0}, {"address": -1}, {"size_bytes": 0}])
def test_a_region_of_impossible_numbers_is_refused(changes: dict[str, int]) -> None:
    (field,) = changes
    with pytest.raises(BadRequest, match=f"nixl.{field}"):
        decode_nixl_region(pb.NixlRegion(**{"address": 4096, "size_bytes": 64} | changes), "nixl")


def test_an_offer_without_a_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="name is"):
        decode_transport_offers([pb.TransportOffer(available=True)], "transports")
