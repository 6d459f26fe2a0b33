"""Hostile bytes are refused by name, in every message of the protocol, without a large allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from kvpact.errors import BadRequest, KvpactError
from kvpact.handoff import codec
from kvpact.handoff.capture_codec import Record, encode_capture
from kvpact.handoff.capture_file import Framing, capture_to_bytes
from kvpact.handoff.messages import PairOffer
from kvpact.handoff.pairing import PairBook
from kvpact.handoff.status import status_to_bytes
from tests.corpus.make import changed, contract, many_heads, many_lengths
from tests.factories import make_contract
from tests.handoff_fakes import READER, WRITER
from tests.handoff_samples import full_contract
from tests.hostile import (
    READERS,
    byte_mutations,
    field_mutations,
    mutations,
    outcome,
    read_capture_bytes,
    read_status,
    varint,
)
from tests.rpc_samples import RPCS
from tests.unit.test_capture_file import full_capture
from tests.unit.test_rpc_messages import directions, fields_of, unset_fields
from tests.unit.test_status import ERRORS

few = settings(max_examples=25, deadline=1000, derandomize=True, database=None)
SERVED_REFUSALS = {"read", "BadRequest", "DataLoss"}
ALLOWED_FACTOR, ALLOWED_BYTES = 40, 400_000
"""Python's objects for a message take this often its bytes, and this much beside."""


def of_direction(name: str) -> list[str]:
    """The samples of a direction."""
    return [sample for sample in RPCS if sample.split(":")[0] == name]


def wrong_outcomes(name: str, found: Iterator[tuple[str, bytes]]) -> list[str]:
    """Labels of what was neither read nor refused as its sender's fault."""
    return [label for label, data in found if outcome(READERS[name], data) not in SERVED_REFUSALS]


def test_every_message_of_every_rpc_has_a_reader_and_a_sample() -> None:
    wanted = {name for name, _ in directions()}
    assert set(READERS) == wanted == {sample.split(":")[0] for sample in RPCS}


def test_every_field_within_is_mutated_since_a_sample_sets_it() -> None:
    kinds: set[str] = set()
    for _, kind in directions():
        list(fields_of(kind, kinds))
    for sample in RPCS.values():
        forget(kinds, sample.DESCRIPTOR)
    assert kinds == set()
    assert unset_fields(RPCS) <= {
        f"kvpact.v1.SamplingState.{name}" for name in ("temperature", "seed", "choice")
    }


def forget(kinds: set[str], kind: Descriptor) -> None:
    """Takes a message and those within it away."""
    seen: set[str] = set()
    list(fields_of(kind, seen))
    kinds -= seen


@pytest.mark.parametrize("sample", RPCS)
def test_a_mutated_message_is_read_or_refused(sample: str) -> None:
    assert wrong_outcomes(sample.split(":")[0], mutations(RPCS[sample])) == []


def test_the_mutations_refuse_and_read_both() -> None:
    seen = {
        outcome(READERS["DecodeService.Push request"], data)
        for _, data in mutations(RPCS["DecodeService.Push request: chunk"])
    }
    assert seen == SERVED_REFUSALS


@pytest.mark.parametrize("name", READERS)
def test_random_bytes_are_read_or_refused(name: str) -> None:
    samples = [RPCS[sample].SerializeToString() for sample in of_direction(name)]

    @few
    @given(st.binary(max_size=200), st.sampled_from(samples), st.integers(0, 4000), st.integers(0, 8))
    def check(noise: bytes, valid: bytes, at: int, gone: int) -> None:
        at = at % (len(valid) + 1)
        for data in (noise, valid[:at] + noise + valid[at + gone :]):
            assert outcome(READERS[name], data) in SERVED_REFUSALS

    check()


@pytest.mark.parametrize("base", [make_contract(), full_contract()], ids=["plain", "full"])
def test_a_mutated_contract_is_refused_or_gets_a_verdict(base: Contract) -> None:
    ours, judged = make_contract(), 0
    for _, data in field_mutations(codec.encode_contract(base)):
        try:
            theirs = codec.contract_from_bytes(data, schema_major=1)
        except BadRequest:
            continue
        judged += 1
        offer = PairOffer(
            schema_major=1,
            contract_digest=contract_digest(theirs),
            writer=WRITER,
            reader=READER,
            contract=data,
        )
        assert outcome(lambda _, offer=offer: PairBook(ours, Policy()).offer(offer), b"") in SERVED_REFUSALS
        codec.encode_verdict(compare(ours, theirs, Policy(), pairing_reach(ours, theirs)))
    assert judged > 20


@pytest.mark.parametrize("change", [many_heads, many_lengths])
def test_a_contract_that_would_take_ages_to_compare_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadRequest):
        codec.contract_from_bytes(contract(change), schema_major=1)


def test_a_mutated_status_is_an_error_that_can_be_told_on() -> None:
    for error in ERRORS:
        for _, data in byte_mutations(status_to_bytes(error), most=60):
            read_status(data)


def test_a_mutated_capture_is_refused_by_its_file(tmp_path: Path) -> None:
    whole = capture_to_bytes(full_capture())
    outcomes = {
        outcome(lambda data: read_capture_bytes(data, tmp_path), data)
        for _, data in byte_mutations(whole, most=80)
    }
    assert outcomes == {"UnreadableSource"}


def test_a_whole_capture_with_a_mutated_message_is_read_or_refused(tmp_path: Path) -> None:
    records = list(encode_capture(full_capture()))
    outcomes = set()
    for index, record in enumerate(records):
        for _, data in byte_mutations(record.data, most=25):
            framing = Framing()
            parts = [framing.head]
            for each in (*records[:index], Record(record.kind, data), *records[index + 1 :]):
                parts += framing.record(each)
            outcomes.add(
                outcome(lambda file: read_capture_bytes(file, tmp_path), b"".join((*parts, framing.end())))
            )
    assert outcomes == {"read", "UnreadableSource"}


def peak_bytes(name: str, data: bytes) -> int:
    """Most that was allocated while a message was read."""
    outcome(READERS[name], data)
    tracemalloc.start()
    outcome(READERS[name], data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("sample", RPCS)
def test_reading_allocates_little_beside_the_message(sample: str) -> None:
    name, valid = sample.split(":")[0], RPCS[sample].SerializeToString()
    hostile = [varint(tag << 3 | 2) + varint(2**40) + valid for tag in range(1, 16)]
    hostile += [
        data
        for label, data in field_mutations(RPCS[sample])
        if label.endswith((str(2**31 - 1) + "'", "many"))
    ]
    for data in hostile[:60]:
        assert peak_bytes(name, data) < ALLOWED_FACTOR * len(data) + ALLOWED_BYTES


def test_a_reader_that_allocates_what_a_message_claims_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "WorkerService.Drain response"
    monkeypatch.setitem(READERS, name, lambda data: bytes(1 << 24))
    with pytest.raises(AssertionError):
        test_reading_allocates_little_beside_the_message(name)


def test_a_reader_that_fails_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DecodeService.Push request"
    monkeypatch.setitem(READERS, name, lambda data: data[0])
    with pytest.raises(IndexError):
        wrong_outcomes(name, mutations(RPCS[f"{name}: open"]))
    monkeypatch.setitem(READERS, name, _out_of_the_blue)
    assert wrong_outcomes(name, mutations(RPCS[f"{name}: open"]))


def _out_of_the_blue(data: bytes) -> object:
    raise KvpactError("internal")


def test_a_name_is_refused_by_its_path() -> None:
    data = changed("DecodeService.Pair request", lambda message: setattr(message.writer, "worker", "a\x00b"))
    with pytest.raises(BadRequest) as refused:
        READERS["DecodeService.Pair request"](data)
    assert refused.value.param == "writer.worker"


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:1", "decode-0.kvpact.svc:65535", "[::1]:9000", "[fe80::1%eth0]:80", "a_b:7"]
)
def test_an_endpoint_of_host_and_port_is_read(endpoint: str) -> None:
    assert codec.decode_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["", "a", ":1", "a:", "a:0", "a:65536", "a:1/x", "unix:/x", "unix:1", "ipv6:[::1]:1", "::1:80", "a b:1",
     "a:1\n", "é:1", "a:٣", "x" * 400 + ":1"],
)  # fmt: skip
def test_an_endpoint_of_anything_else_is_refused(endpoint: str) -> None:
    with pytest.raises(BadRequest) as refused:
        codec.decode_endpoint(endpoint)
    assert len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)


def test_a_sentence_of_a_peer_becomes_one_short_printable_line() -> None:
    reason = codec.decode_reason("a\nb\x1b[31m" + "c" * 100_000)
    assert reason.isprintable()
    assert len(reason) <= 256
    assert codec.decode_reason("the writer gave up") == "the writer gave up"
