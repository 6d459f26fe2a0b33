"""Servers that got hostile bytes on every method still serve, hold no handoff and have every block free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.fleet import Fleet
from coordinator.grpc_transport import GrpcTransport
from coordinator.service import CoordinatorServer
from kvpact.clock import ManualClock
from kvpact.contract.identity import contract_digest
from kvpact.handoff import codec
from kvpact.handoff.messages import Chunk, Commit, Open, PairOffer
from kvpact.handoff.security_transport import PLAINTEXT
from kvpact.metrics import Metrics
from kvpact.types import Role, WorkerLife
from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2
from tests.fakes import make_tiny_model, prompt_of
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    all_parts,
    first_token,
    grpc_wire,
    make_handoff_id,
    progress,
)
from tests.handoff_samples import full_terms
from tests.hostile import field_mutations
from tests.hostile_calls import DEADLINE_S, EVERY, bodies, harmed, outcome_of, pelt
from tests.live_roles import Behind, LiveRoles, live_roles
from tests.rpc_samples import RPCS

PUSH = "/kvpact.v1.DecodeService/Push"
OVERSIZED = bytes(5 << 20)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with grpc_wire() as made:
        await made.sender().pair(READER)
        yield made
        for waiting in made.asleep:
            waiting.cancel()


@asynccontextmanager
async def raw(endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that sends bytes as they are, of any size."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        yield channel


@pytest.fixture
async def channel(wire: Wire) -> AsyncIterator[grpc.aio.Channel]:
    async with raw(wire.port.endpoint) as made:  # type: ignore[attr-defined]
        yield made


async def serves(wire: Wire, number: int = 9_000) -> None:
    """A handoff works from pairing to commit; all that was granted is given back."""
    async with asyncio.timeout(DEADLINE_S):
        await wire.port.release(make_handoff_id(1), "a hostile one may still be reserved")
        await wire.reader.emptied()
        sender = wire.sender()
        await sender.pair(READER)
        terms = wire.terms(number=number)
        await sender.hand_over(
            terms, MAX_OUTPUT_TOKENS, progress(40), FakeCache(wire.contract), first_token()
        )
        await wire.port.release(terms.handoff_id, "the test is done")
        await wire.reader.emptied()


def aimed(wire: Wire) -> dict[str, Any]:
    """A valid message for each unary method of a decode worker, for the pair that there is."""
    reserve = codec.encode_reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    decode = RPCS["DecodeService.Decode request"]
    return {
        "DecodeService/Pair": RPCS["DecodeService.Pair request"],
        "DecodeService/Reserve": reserve,
        "DecodeService/Decode": decode,
        "WorkerService/Renew": RPCS["WorkerService.Renew request"],
        "WorkerService/GetVerdict": RPCS["WorkerService.GetVerdict request"],
        "WorkerService/Describe": RPCS["WorkerService.Describe request"],
    }


METHODS = (
    "DecodeService/Pair",
    "DecodeService/Reserve",
    "DecodeService/Decode",
    "WorkerService/Renew",
    "WorkerService/GetVerdict",
    "WorkerService/Describe",
)


@pytest.mark.parametrize("method", METHODS)
async def test_a_method_withstands_hostile_messages(
    wire: Wire, channel: grpc.aio.Channel, method: str
) -> None:
    messages = [*bodies(aimed(wire)[method]), OVERSIZED]
    found = await pelt(channel, f"/kvpact.v1.{method}", messages, streams=method.endswith("Decode"))
    assert found.total() == EVERY + 1
    assert not harmed(found), found
    await serves(wire)


async def test_hostile_releases_bury_ids_and_nothing_else(wire: Wire, channel: grpc.aio.Channel) -> None:
    message = handoff_pb2.ReleaseRequest(
        handoff_id=make_handoff_id(77), reason="r" * 200, writer_stopped=True
    )
    found = await pelt(channel, "/kvpact.v1.WorkerService/Release", bodies(message))
    assert not harmed(found), found
    await serves(wire)


async def test_drains_that_are_no_message_drain_nothing(wire: Wire, channel: grpc.aio.Channel) -> None:
    found = await pelt(channel, "/kvpact.v1.WorkerService/Drain", [b"\xff", b"\x0a\x7f", b"\x08", OVERSIZED])
    assert grpc.StatusCode.OK not in found
    await serves(wire)


async def streams_of(wire: Wire, number: int) -> tuple[bytes, bytes, bytes]:
    """Open, a chunk and commit of a handoff that was reserved just now."""
    parts = await all_parts(wire, wire.terms(number=number))
    opened, chunk, commit = parts[0], parts[1], parts[-1]
    assert isinstance(opened, Open)
    assert isinstance(chunk, Chunk)
    assert isinstance(commit, Commit)
    return codec.push_to_bytes(opened), codec.push_to_bytes(chunk), codec.push_to_bytes(commit)


async def test_push_withstands_hostile_streams(wire: Wire, channel: grpc.aio.Channel) -> None:
    opened, chunk, commit = await streams_of(wire, 1)
    small = decode_pb2.PushRequest.FromString(chunk)
    small.chunk.payload = small.chunk.payload[:8]
    hostile = bodies(small, 120) + [
        data for _, data in field_mutations(decode_pb2.PushRequest.FromString(commit))
    ]
    streams = [
        [],
        [b""],
        [chunk],
        [commit],
        [opened, opened],
        [opened, OVERSIZED],
        *([each] for each in hostile),
    ]
    found = await pelt(channel, PUSH, streams)
    assert not harmed(found), found
    await wire.port.release(make_handoff_id(1), "opened")
    for number, data in enumerate(hostile[:80], start=100):
        opened, chunk, commit = await streams_of(wire, number)
        code = await outcome_of(channel, PUSH, [opened, chunk, data, commit])
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.ABORTED)
        await wire.reader.emptied()
    await serves(wire)


async def test_a_push_of_endless_small_chunks_ends_at_the_first_wrong_one(
    wire: Wire, channel: grpc.aio.Channel
) -> None:
    opened, chunk, _ = await streams_of(wire, 1)

    def endless() -> Iterator[bytes]:
        yield opened
        while True:
            yield chunk

    assert await outcome_of(channel, PUSH, endless()) is grpc.StatusCode.DATA_LOSS
    await wire.reader.emptied()
    await serves(wire)


async def test_half_open_pushes_that_are_dropped_give_their_blocks_back(
    wire: Wire, channel: grpc.aio.Channel
) -> None:
    calls = []
    for number in range(1, 13):
        opened, chunk, _ = await streams_of(wire, number)
        call = channel.stream_unary(PUSH)()
        await call.write(opened)
        if number % 2:
            await call.write(chunk)
        calls.append(call)
    assert not wire.reader.all_free()
    async with asyncio.timeout(DEADLINE_S):
        while any(not handoff.session.opened for handoff in wire.reader.receiver._table.held()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()
        await wire.reader.emptied()
    await serves(wire)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def endpoints_of(live: LiveRoles) -> tuple[str, str]:
    """Of the prefill worker and of the decode worker itself, not its proxy."""
    prefill = next(s.worker for s in live.fleet.snapshot().workers if s.worker.role is Role.PREFILL)
    transport = live.fleet._transport
    assert isinstance(transport, Behind)
    return prefill.endpoint, next(iter(transport._endpoints.values()))


def at_roles(live: LiveRoles) -> list[tuple[str, str, Any, bool]]:
    """(endpoint, method, a message that the worker takes for one of its own, whether it streams)."""
    prefill, decode = live.prefill.description(), live.decode.description()
    job = decode_pb2.GenerateRequest()
    job.CopyFrom(RPCS["DecodeService.Generate request"])
    job.decode.CopyFrom(codec.encode_life(decode.life))
    alone = type(RPCS["PrefillService.Prefill request"])()
    alone.CopyFrom(RPCS["PrefillService.Prefill request"])
    alone.prefill.CopyFrom(codec.encode_life(prefill.life))
    alone.decode_endpoint = "127.0.0.1:1"
    connect = type(RPCS["PrefillService.Connect request"])(
        decode_endpoint="127.0.0.1:1", decode=codec.encode_life(READER)
    )
    stranger = WorkerLife(worker="prefill-9", incarnation=b"9" * 16)
    offer = PairOffer(
        schema_major=1,
        contract_digest=contract_digest(prefill.contract),
        writer=stranger,
        reader=decode.life,
        contract=codec.contract_to_bytes(prefill.contract),
    )
    terms = codec.encode_reserve(replace(full_terms(), writer=stranger, reader=decode.life), 4)
    decode_service, prefill_service = "/kvpact.v1.DecodeService/", "/kvpact.v1.PrefillService/"
    ends = endpoints_of(live)
    return [
        (ends[1], decode_service + "Generate", job, True),
        (ends[1], decode_service + "Pair", codec.encode_offer(offer), False),
        (ends[1], decode_service + "Reserve", terms, False),
        (ends[1], decode_service + "Decode", RPCS["DecodeService.Decode request"], True),
        (ends[0], prefill_service + "Prefill", alone, True),
        (ends[0], prefill_service + "Connect", connect, False),
    ]


async def test_both_roles_withstand_hostile_orders(folder: Path) -> None:
    async with live_roles(folder) as live:
        wanted = await live.generate(prompt_of(40), 4)
        await live.becomes_idle()
        tasks = len(asyncio.all_tasks())
        for endpoint, method, message, streams in at_roles(live):
            async with raw(endpoint) as channel:
                found = await pelt(channel, method, bodies(message), streams=streams)
            assert found.total() == EVERY
            assert harmed(found) <= {grpc.StatusCode.UNAVAILABLE}, (method, found)
        assert live.prefill.alive()
        assert live.decode.alive()
        await live.becomes_idle()
        assert await live.generate(prompt_of(40), 4) == wanted
        await live.becomes_idle()
        async with asyncio.timeout(DEADLINE_S):
            while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110  gRPC ends its own right after a call
                await asyncio.sleep(0.001)


@asynccontextmanager
async def coordinator() -> AsyncIterator[tuple[Fleet, str]]:
    """A coordinator's service alone."""
    fleet = Fleet(GrpcTransport(), ManualClock(), Metrics(model_name="tiny"))
    server = CoordinatorServer(fleet, PLAINTEXT)
    endpoint = await server.start("127.0.0.1", 0)
    yield fleet, endpoint
    await server.stop()
    await fleet.stop()


async def test_the_coordinator_withstands_hostile_registrations() -> None:
    register = coordinator_pb2.RegisterRequest()
    register.CopyFrom(RPCS["CoordinatorService.Register request"])
    register.endpoint = "127.0.0.1:1"
    beat = RPCS["CoordinatorService.Heartbeat request"]
    async with coordinator() as (fleet, endpoint), raw(endpoint) as channel:
        for method, message in (("Register", register), ("Heartbeat", beat)):
            found = await pelt(
                channel, f"/kvpact.v1.CoordinatorService/{method}", [*bodies(message), OVERSIZED]
            )
            assert not harmed(found), (method, found)
        known = [state.worker for state in fleet.snapshot().workers]
        assert all(worker.endpoint == "127.0.0.1:1" for worker in known)
        assert all(worker.life.worker.isprintable() and len(worker.life.worker) < 300 for worker in known)
        honest = register.SerializeToString()
        assert (
            await outcome_of(channel, "/kvpact.v1.CoordinatorService/Register", honest) is grpc.StatusCode.OK
        )
        assert any(state.worker.life == READER for state in fleet.snapshot().workers)


async def test_a_server_that_leaks_a_block_is_noticed(wire: Wire) -> None:
    leaked = wire.reader.pool.allocate(1, "handoff")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await wire.reader.emptied()
    wire.reader.pool.free(leaked, "handoff")
    await serves(wire)


async def test_a_server_that_dies_or_fails_otherwise_is_noticed() -> None:
    async with raw("127.0.0.1:1") as channel:
        found = await pelt(channel, PUSH, [[b""]])
    assert harmed(found) == {grpc.StatusCode.UNAVAILABLE}
    async with grpc_wire() as wire, raw(wire.port.endpoint) as channel:  # type: ignore[attr-defined]
        await wire.sender().pair(READER)
        wire.reader.landing.failure = ZeroDivisionError("a mistake")
        opened, chunk, commit = await streams_of(wire, 1)
        found = await pelt(channel, PUSH, [[opened, chunk, commit]])
    assert harmed(found) == {grpc.StatusCode.INTERNAL}
