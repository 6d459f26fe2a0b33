"""Each request and response of each rpc has fixed bytes, with every field that the message has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import Message

from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2
from tests.contract.golden.message_bytes import GOLDEN_RPCS, read_golden, rpc_bytes
from tests.rpc_samples import JOBS, RPCS

FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2)
)
GOLDEN = read_golden(GOLDEN_RPCS)
NEVER_SET_BY_US = {
    "kvpact.v1.SamplingState.temperature",
    "kvpact.v1.SamplingState.seed",
    "kvpact.v1.SamplingState.choice",
}
"""Fields of sampling that this release doesn't have yet."""


def directions() -> Iterator[tuple[str, Descriptor]]:
    """(name of the sample, its message) of each rpc."""
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield f"{service.name}.{method.name} request", method.input_type
                yield f"{service.name}.{method.name} response", method.output_type


def fields_set(message: Message) -> Iterator[str]:
    """Full names of the fields that are set somewhere in a message."""
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None:
            for item in value if field.is_repeated else [value]:
                yield from fields_set(item)


def fields_of(kind: Descriptor, seen: set[str]) -> Iterator[str]:
    """Full names of all fields within a message."""
    if kind.full_name in seen or not kind.full_name.startswith("kvpact."):
        return
    seen.add(kind.full_name)
    for field in kind.fields:
        yield field.full_name
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


@pytest.mark.parametrize("name", RPCS)
def test_bytes_of_a_message_are_the_golden_ones(name: str) -> None:
    assert rpc_bytes(name).hex() == GOLDEN[name]
    assert type(RPCS[name]).FromString(bytes.fromhex(GOLDEN[name])) == RPCS[name]


@pytest.mark.parametrize("name", JOBS)
def test_golden_bytes_of_a_job_give_the_value_back(name: str) -> None:
    sample = JOBS[name]
    assert sample.to_bytes(sample.value).hex() == GOLDEN[name]
    assert sample.from_bytes(bytes.fromhex(GOLDEN[name])) == sample.value


def test_every_rpc_has_a_sample_each_way_of_its_own_message() -> None:
    wanted = dict(directions())
    kinds = {name.split(":")[0]: message.DESCRIPTOR for name, message in RPCS.items()}
    assert {name: kind.full_name for name, kind in kinds.items()} == {
        name: kind.full_name for name, kind in wanted.items()
    }
    assert set(GOLDEN) == set(RPCS)


def unset_fields(samples: dict[str, Message]) -> set[str]:
    """Fields of handoffs and jobs that no sample sets; contracts have samples of their own."""
    seen: set[str] = {"kvpact.v1.Contract", "kvpact.v1.RotaryTable"}
    known = {field for _, kind in directions() for field in fields_of(kind, seen)}
    return known - {field for message in samples.values() for field in fields_set(message)}


def test_every_field_is_set_in_some_sample() -> None:
    assert unset_fields(RPCS) <= NEVER_SET_BY_US


def test_the_search_for_unset_fields_finds_one() -> None:
    fewer = {name: message for name, message in RPCS.items() if not name.startswith("WorkerService.Release")}
    assert "kvpact.v1.ReleaseRequest.reason" in unset_fields(fewer)
