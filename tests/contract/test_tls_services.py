"""Each service over mutual TLS: its own callers do their work; others are refused and leave no trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from coordinator.fleet import Fleet
from coordinator.grpc_transport import GrpcDecodePort, GrpcPrefillPort, GrpcTransport
from coordinator.service import CoordinatorServer
from decode_worker.service import add_decode_service
from kvpact.clock import ManualClock
from kvpact.errors import KvpactError, NotPermitted, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.jobs import DecodeJob, GenerateJob, Partner, PrefillJob
from kvpact.handoff.security_transport import PLAINTEXT, Security
from kvpact.handoff.service import add_worker_service
from kvpact.metrics import Metrics
from kvpact.serving.registration_transport import Registrar
from kvpact.tls import PeerRole
from kvpact.types import Role, Sampling
from kvpact.v1 import coordinator_pb2, coordinator_pb2_grpc, prefill_pb2_grpc
from tests.coordinator_fakes import FakeDecode, FakePrefill, Script, make_life, make_load
from tests.factories import make_contract
from tests.handoff_fakes import (
    READER,
    FakeDecoder,
    FakeReader,
    Wire,
    all_parts,
    expected_blocks,
    make_handoff_id,
    make_reader,
    order_of,
    stream,
)
from tests.tls_files import make_certificates, security_of

SAMPLING = Sampling(max_output_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSide:
    """A decode worker's services over a receiver without an engine."""

    reader: FakeReader
    endpoint: str

    def port(self, security: Security) -> GrpcReaderPort:
        """What a prefill worker opens."""
        return GrpcReaderPort(self.endpoint, READER, security=security)

    def wire(self, port: GrpcReaderPort) -> Wire:
        """A writer at the other end of `port`."""
        return Wire(reader=self.reader, port=port, contract=make_contract(), clock=self.reader.clock)

    def untouched(self) -> bool:
        """Whether no caller left anything."""
        return self.reader.all_free() and not self.reader.landing.landed


@asynccontextmanager
async def decode_side(security: Security) -> AsyncIterator[DecodeSide]:
    """Serves on loopback."""
    reader = make_reader()
    server = security.make_server()
    add_decode_service(server, reader.receiver, FakeDecoder(reader.receiver, reader.pool))
    add_worker_service(server, reader)
    port = security.bind(server, "127.0.0.1:0")
    await server.start()
    yield DecodeSide(reader=reader, endpoint=f"127.0.0.1:{port}")
    await server.stop(None)
    reader.receiver.close()


@asynccontextmanager
async def fake_workers(security: Security) -> AsyncIterator[tuple[FakePrefill, FakeDecode, str]]:
    """The scripted workers of the coordinator's tests, both behind one server of `security`."""
    script = Script()
    prefill, decode = FakePrefill(script, make_life("prefill-0")), FakeDecode(script, make_life("decode-0"))
    server = security.make_server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
    decode._add(server)
    port = security.bind(server, "127.0.0.1:0")
    await server.start()
    yield prefill, decode, f"127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def coordinator_side(security: Security) -> AsyncIterator[tuple[Fleet, str]]:
    """The coordinator's gRPC side."""
    fleet = Fleet(GrpcTransport(security), ManualClock(), Metrics("tiny"))
    server = CoordinatorServer(fleet, security)
    endpoint = await server.start("127.0.0.1", 0)
    yield fleet, endpoint
    await server.stop()
    await fleet.stop()


def callers(folder: Path, other: Path, *allowed: PeerRole) -> dict[str, Security]:
    """Everybody who may not call: other roles, the right roles of another CA, and nobody at all."""
    wrong = {role.value: security_of(folder, role) for role in PeerRole if role not in allowed}
    strange = {f"{role.value} of another CA": security_of(other, role) for role in allowed}
    return wrong | strange | {"plaintext": PLAINTEXT}


async def check_refused(who: str, call: Awaitable[object]) -> None:
    """A wrong role is told so; whoever isn't known has no connection."""
    expected: type[KvpactError] = NotPermitted if who in set(PeerRole) else Unavailable
    with pytest.raises(KvpactError) as caught:
        await call
    assert type(caught.value) is expected, f"{who}: {caught.value!r}"


async def test_a_whole_handoff_goes_through_under_the_right_certificates(folder: Path) -> None:
    async with decode_side(security_of(folder, PeerRole.DECODE)) as side:
        port = side.port(security_of(folder, PeerRole.PREFILL))
        wire = side.wire(port)
        await wire.sender().pair(READER)
        terms = wire.terms()
        parts = await all_parts(wire, terms)
        assert await port.renew(terms.handoff_id, READER) > 0
        await port.push(stream(parts))
        assert side.reader.landing.landed == expected_blocks(wire, terms)
        decode = GrpcDecodePort(
            security_of(folder, PeerRole.COORDINATOR).link(side.endpoint, PeerRole.DECODE)
        )
        tokens = [item async for item in decode.decode(decode_job(order_of(terms)))]
        assert tokens[-1].finish_reason is not None
        await port.release(terms.handoff_id, "end of the test")
        assert side.reader.all_free()
        await decode.close()
        await port.close()


def decode_job(token_ids: tuple[int, ...]) -> DecodeJob:
    return DecodeJob(
        handoff_id=make_handoff_id(),
        decode=READER,
        token_ids=token_ids,
        original_prompt_tokens=len(token_ids) - 1,
        sampling=SAMPLING,
        request_id="request",
    )


async def test_a_stranger_can_not_pair_reserve_or_push(folder: Path, other: Path) -> None:
    async with decode_side(security_of(folder, PeerRole.DECODE)) as side:
        right = side.port(security_of(folder, PeerRole.PREFILL))
        wire = side.wire(right)
        await wire.sender().pair(READER)
        parts = await all_parts(wire, wire.terms(number=1))
        held = side.reader.receiver.held()
        for who, security in callers(folder, other, PeerRole.PREFILL).items():
            port = side.port(security)
            strange = side.wire(port)
            await check_refused(who, strange.sender().pair(READER))
            await check_refused(who, port.reserve(strange.terms(number=2), 8))
            await check_refused(who, port.push(stream(parts)))
            assert side.reader.receiver.held() == held
            assert not side.reader.landing.landed
            await port.close()
        await right.push(stream(parts))
        assert side.reader.landing.landed
        await right.close()


async def test_a_stranger_can_not_renew_or_release(folder: Path, other: Path) -> None:
    async with decode_side(security_of(folder, PeerRole.DECODE)) as side:
        right = side.port(security_of(folder, PeerRole.PREFILL))
        wire = side.wire(right)
        await wire.sender().pair(READER)
        terms = wire.terms()
        await right.reserve(terms, 8)
        for who, security in callers(folder, other, PeerRole.PREFILL, PeerRole.COORDINATOR).items():
            port = side.port(security)
            await check_refused(who, port.renew(terms.handoff_id, READER))
            await check_refused(who, port.release(terms.handoff_id, "mine"))
            await port.close()
        assert side.reader.receiver.held() == 1
        coordinator = side.port(security_of(folder, PeerRole.COORDINATOR))
        await coordinator.release(terms.handoff_id, "given up")
        assert side.untouched()
        await coordinator.close()
        await right.close()


async def test_a_stranger_can_not_decode_or_generate(folder: Path, other: Path) -> None:
    async with fake_workers(security_of(folder, PeerRole.DECODE)) as (_, decode, endpoint):
        order = (1, 2, 3)
        generate = GenerateJob(
            decode=decode.life,
            token_ids=order,
            original_prompt_tokens=len(order),
            table_length=8,
            sampling=SAMPLING,
            request_id="request",
        )
        for who, security in callers(folder, other, PeerRole.COORDINATOR).items():
            port = GrpcDecodePort(security.link(endpoint, PeerRole.DECODE))
            await check_refused(who, anext(port.decode(decode_job(order))))
            await check_refused(who, anext(port.generate(generate)))
            await port.close()
        assert decode.requests == []
        right = GrpcDecodePort(security_of(folder, PeerRole.COORDINATOR).link(endpoint, PeerRole.DECODE))
        assert [item async for item in right.decode(decode_job(order))]
        assert [item async for item in right.generate(generate)]
        await right.close()


async def test_a_stranger_can_not_connect_or_prefill(folder: Path, other: Path) -> None:
    async with fake_workers(security_of(folder, PeerRole.PREFILL)) as (prefill, decode, endpoint):
        partner = Partner(life=decode.life, endpoint=endpoint)
        job = PrefillJob(
            handoff_id=make_handoff_id(),
            prefill=prefill.life,
            decode=None,
            token_ids=(1, 2, 3),
            original_prompt_tokens=3,
            table_length=8,
            sampling=SAMPLING,
            request_id="request",
        )
        for who, security in callers(folder, other, PeerRole.COORDINATOR).items():
            port = GrpcPrefillPort(security.link(endpoint, PeerRole.PREFILL))
            await check_refused(who, port.connect(partner))
            await check_refused(who, anext(port.prefill(job)))
            await port.close()
        assert prefill.connects == 0
        assert prefill.requests == []
        right = GrpcPrefillPort(security_of(folder, PeerRole.COORDINATOR).link(endpoint, PeerRole.PREFILL))
        await right.connect(partner)
        assert [event async for event in right.prefill(job)]
        await right.close()


@pytest.mark.parametrize("role", Role)
async def test_a_stranger_can_not_register_or_beat(folder: Path, other: Path, role: Role) -> None:
    worker = make_life(f"{role}-0")
    registration = coordinator_pb2.RegisterRequest(
        worker=codec.encode_life(worker),
        role=codec.encode_role(role),
        endpoint="127.0.0.1:1",
        contract=codec.encode_contract(make_contract()),
        load=codec.encode_load(make_load()),
        pid=1,
    )
    beat = coordinator_pb2.HeartbeatRequest(worker=registration.worker, load=codec.encode_load(make_load()))
    async with coordinator_side(security_of(folder, PeerRole.COORDINATOR)) as (fleet, endpoint):

        async def announce(security: Security, *requests: object) -> None:
            link = security.link(endpoint, PeerRole.COORDINATOR)
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(link.channel)
            try:
                for request in requests:
                    method = stub.Heartbeat if request is beat else stub.Register
                    await method(request)
            except grpc.aio.AioRpcError as error:
                raise link.failure(error) from error
            finally:
                await link.channel.close()

        own = PeerRole(role.value)
        for who, security in callers(folder, other, own).items():
            await check_refused(who, announce(security, registration))
        assert fleet.snapshot().workers == ()
        await announce(security_of(folder, own), registration, beat)
        assert [state.worker.life for state in fleet.snapshot().workers] == [worker]
        for who, security in callers(folder, other, own).items():
            await check_refused(who, announce(security, beat))


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_registrar_makes_its_worker_known(folder: Path, encrypted: bool) -> None:
    server = security_of(folder, PeerRole.COORDINATOR) if encrypted else PLAINTEXT
    async with coordinator_side(server) as (fleet, endpoint):
        life = make_life("decode-0")
        registrar = Registrar(
            coordinator=endpoint,
            life=life,
            role=Role.DECODE,
            endpoint="127.0.0.1:1",
            contract=make_contract(),
            load=make_load,
            security=security_of(folder, PeerRole.DECODE) if encrypted else PLAINTEXT,
        )
        changed = asyncio.ensure_future(fleet.change())
        registrar.start()
        await asyncio.wait_for(changed, 10)
        assert fleet.role_of(life) is Role.DECODE
        await registrar.stop()


async def test_a_prefill_worker_behind_a_decode_worker_s_address_gets_no_cache(folder: Path) -> None:
    async with decode_side(security_of(folder, PeerRole.PREFILL)) as side:
        port = side.port(security_of(folder, PeerRole.PREFILL))
        with pytest.raises(Unavailable, match=r"isn't for decode\.kvpact"):
            await side.wire(port).sender().pair(READER)
        await port.close()
        assert side.untouched()
