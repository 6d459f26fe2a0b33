"""Both services over gRPC: Describe, GetVerdict, Decode, plain clients, and calls that reach nobody."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import grpc
import pytest

from decode_worker.service import add_decode_service
from kvpact.errors import BadRequest, ContractRefused, Fenced, KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.jobs import DecodedTokens, DecodeJob
from kvpact.handoff.malloc import tune_malloc
from kvpact.handoff.status import from_rpc_error
from kvpact.types import ContractDigest, FinishReason, Role, Sampling
from kvpact.v1 import decode_pb2, decode_pb2_grpc
from tests.factories import make_contract
from tests.handoff_fakes import (
    FIRST_TOKEN_ID,
    MAX_OUTPUT_TOKENS,
    READER,
    Wire,
    all_parts,
    grpc_wire,
    make_handoff_id,
    make_reader,
    stream,
)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with grpc_wire() as wire:
        await wire.sender().pair(READER)
        yield wire


def port_of(wire: Wire) -> GrpcReaderPort:
    assert isinstance(wire.port, GrpcReaderPort)
    return wire.port


def job_for(wire: Wire, *, last: int = FIRST_TOKEN_ID) -> DecodeJob:
    return DecodeJob(
        handoff_id=wire.terms().handoff_id,
        decode=READER,
        token_ids=(*wire.terms().token_ids, last),
        sampling=Sampling(max_output_tokens=MAX_OUTPUT_TOKENS),
        original_prompt_tokens=40,
        request_id="r",
    )


async def decode(endpoint: str, job: DecodeJob) -> list[DecodedTokens]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(codec.encode_decode_job(job), timeout=10)
        try:
            return [codec.decode_decoded_tokens(message) async for message in call]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=endpoint) from error


async def test_describe_tells_what_the_worker_is(wire: Wire) -> None:
    description = await port_of(wire).describe()
    assert (description.life, description.role) == (READER, Role.DECODE)
    assert description.contract == wire.reader.contract
    assert description.load.blocks.total == 64


async def test_a_whole_verdict_is_read_by_its_digests(wire: Wire) -> None:
    other = replace(wire, contract=make_contract(theta=1e5))
    verdict = (await other.sender().pair(READER)).verdict
    assert await port_of(wire).verdict(verdict.writer_digest, verdict.reader_digest) == verdict
    with pytest.raises(BadRequest, match="no verdict"):
        await port_of(wire).verdict(ContractDigest(b"x" * 32), verdict.reader_digest)


async def test_a_refusal_of_hundreds_of_differences_arrives_whole() -> None:
    groups = make_contract(layers=1).layer_groups
    layers = tuple(replace(groups[0], layers=(layer,), softmax_scale=1 / (layer + 2)) for layer in range(300))
    contract = make_contract(layer_groups=layers)
    other = make_contract(layer_groups=tuple(replace(group, softmax_scale=9.0) for group in layers))
    async with grpc_wire(reader=make_reader(contract=other), contract=contract) as wire:
        verdict = (await wire.sender().pair(READER)).verdict
        with pytest.raises(ContractRefused) as refused:
            await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
        assert refused.value.verdict == verdict


async def test_decode_streams_tokens_once_per_handoff(wire: Wire) -> None:
    await wire.port.push(stream(await all_parts(wire, wire.terms())))
    endpoint = port_of(wire).endpoint
    tokens = await decode(endpoint, job_for(wire))
    assert tokens == [
        DecodedTokens(token_ids=(FIRST_TOKEN_ID, FIRST_TOKEN_ID), finish_reason=None),
        DecodedTokens(token_ids=(40,), finish_reason=FinishReason.LENGTH),
    ]
    assert wire.reader.all_free()
    with pytest.raises(Fenced, match="taken by Decode before"):
        await decode(endpoint, job_for(wire))


async def test_decode_of_other_tokens_is_refused_and_leaves_the_handoff(wire: Wire) -> None:
    await wire.port.push(stream(await all_parts(wire, wire.terms())))
    with pytest.raises(Fenced):
        await decode(port_of(wire).endpoint, job_for(wire, last=8))
    assert await decode(port_of(wire).endpoint, job_for(wire))


async def test_an_unset_field_of_a_request_is_a_bad_request(wire: Wire) -> None:
    async with grpc.aio.insecure_channel(port_of(wire).endpoint) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Reserve(decode_pb2.ReserveRequest(max_output_tokens=1), timeout=10)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(failed.value, peer="reader")
    assert isinstance(error, BadRequest)
    assert error.param == "terms"


async def test_a_plain_protobuf_client_can_push(wire: Wire) -> None:
    messages = [
        decode_pb2.PushRequest.FromString(codec.push_to_bytes(part))
        for part in await all_parts(wire, wire.terms())
    ]
    async with grpc.aio.insecure_channel(port_of(wire).endpoint) as channel:
        await decode_pb2_grpc.DecodeServiceStub(channel).Push(iter(messages), timeout=10)
    assert wire.reader.receiver.counters().committed == 1


async def test_a_decoder_is_closed_when_its_client_leaves() -> None:
    closed = []

    class Endless:
        async def decode(self, job: DecodeJob) -> AsyncGenerator[DecodedTokens, None]:
            try:
                while True:
                    yield DecodedTokens(token_ids=(1,), finish_reason=None)
            finally:
                closed.append(job.request_id)

    server = grpc.aio.server()
    add_decode_service(server, make_reader().receiver, Endless())
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc_wire() as wire, grpc.aio.insecure_channel(endpoint) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(codec.encode_decode_job(job_for(wire)))
        await call.read()
        call.cancel()
    await server.stop(5)
    assert closed == ["r"]


async def test_a_reader_that_is_not_there_is_unavailable() -> None:
    async with grpc_wire() as wire:
        endpoint = port_of(wire).endpoint
        terms = wire.terms()
    port = GrpcReaderPort(endpoint, READER, deadline_s=5.0)
    try:
        with pytest.raises(Unavailable, match=endpoint):
            await port.reserve(terms, MAX_OUTPUT_TOKENS)
        with pytest.raises(Unavailable):
            await port.push(stream([]))
    finally:
        await port.close()


async def test_a_reader_that_does_not_answer_in_time_is_unavailable() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = GrpcReaderPort(f"127.0.0.1:{silent.getsockname()[1]}", READER, deadline_s=0.2)
    try:
        with pytest.raises(Unavailable, match="no answer in time"):
            await port.renew(make_handoff_id(), READER)
    finally:
        await port.close()
        silent.close()


async def test_an_unexpected_failure_of_a_landing_is_internal_without_its_text(wire: Wire) -> None:
    parts = await all_parts(wire, wire.terms())
    wire.reader.landing.failure = RuntimeError("/secret/path")
    with pytest.raises(KvpactError) as failed:
        await wire.port.push(stream(parts))
    assert type(failed.value) is KvpactError
    assert "secret" not in str(failed.value)
    await wire.reader.emptied()


def test_malloc_is_tuned_where_there_is_glibc() -> None:
    assert tune_malloc() is (sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc")
