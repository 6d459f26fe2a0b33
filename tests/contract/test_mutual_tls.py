"""Who is let in over real connections: every call by every caller, and servers that aren't whom they seem."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpact.errors import NotPermitted, Unavailable
from kvpact.handoff.permissions import CALLERS
from kvpact.handoff.security_transport import PLAINTEXT, MutualTls
from kvpact.serving.server_transport import WorkerServer
from kvpact.tls import PeerRole
from tests.tls_calls import ECHO, METHODS, AnyCall, any_call_server, failure, outcome
from tests.tls_files import make_certificates, paths_of, security_of

REFUSED = "NOT_PERMITTED"
CUT_OFF = "UNAVAILABLE"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "other")


@asynccontextmanager
async def stranger(endpoint: str, ca: Path, shown: Path | None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of a caller that takes a decode server and shows a certificate of `shown`, or none."""
    root = (ca / "ca.crt").read_bytes()
    pair = {} if shown is None else certificate(shown)
    credentials = grpc.ssl_channel_credentials(root, **pair)
    options = [("grpc.ssl_target_name_override", "decode.kvpact")]
    async with grpc.aio.secure_channel(endpoint, credentials, options=options) as channel:
        yield channel


def certificate(folder: Path) -> dict[str, bytes]:
    paths = paths_of(folder, PeerRole.PREFILL)
    return {"private_key": paths.key.read_bytes(), "certificate_chain": paths.cert.read_bytes()}


@pytest.mark.parametrize("caller", PeerRole)
async def test_each_role_reaches_the_calls_of_its_rows_alone(folder: Path, caller: PeerRole) -> None:
    async with any_call_server(security_of(folder, PeerRole.DECODE)) as (server, endpoint):
        link = security_of(folder, caller).link(endpoint, PeerRole.DECODE)
        outcomes = {method: await outcome(link.channel, method) for method in METHODS}
        await link.channel.close()
    expected = {method: "reached" if caller in CALLERS[method] else REFUSED for method in METHODS}
    assert outcomes == expected
    assert sorted(server.reached) == sorted(method for method, how in expected.items() if how == "reached")
    assert server.reached


async def test_without_the_guard_any_role_reaches_every_call(folder: Path) -> None:
    calls, server, security = AnyCall(), grpc.aio.server(), security_of(folder, PeerRole.DECODE)
    server.add_generic_rpc_handlers((calls,))
    endpoint = f"127.0.0.1:{security.bind(server, '127.0.0.1:0')}"
    await server.start()
    channel = security_of(folder, PeerRole.ADMIN).link(endpoint, PeerRole.DECODE).channel
    assert {await outcome(channel, method) for method in METHODS} == {"reached"}
    await channel.close()
    await server.stop(None)


async def test_a_caller_without_a_certificate_reaches_nothing(folder: Path) -> None:
    async with (
        any_call_server(security_of(folder, PeerRole.DECODE)) as (server, endpoint),
        stranger(endpoint, folder, None) as channel,
    ):
        assert {await outcome(channel, method) for method in METHODS} == {CUT_OFF}
    assert server.reached == []


async def test_a_caller_of_another_ca_reaches_nothing(folder: Path, other: Path) -> None:
    async with any_call_server(security_of(folder, PeerRole.DECODE)) as (server, endpoint):
        async with stranger(endpoint, folder, other) as channel:
            assert {await outcome(channel, method) for method in METHODS} == {CUT_OFF}
        assert server.reached == []
        async with stranger(endpoint, folder, folder) as channel:
            assert await outcome(channel, ECHO) == "reached"


async def test_a_plaintext_caller_reaches_nothing_and_is_told_what_to_set(folder: Path) -> None:
    async with any_call_server(security_of(folder, PeerRole.DECODE)) as (server, endpoint):
        link = PLAINTEXT.link(endpoint, PeerRole.DECODE)
        assert {await outcome(link.channel, method) for method in METHODS} == {CUT_OFF}
        error = await failure(link)
        await link.channel.close()
    assert server.reached == []
    assert isinstance(error, Unavailable)
    assert "only callers with a certificate: set tls" in str(error)


async def test_a_server_in_plaintext_is_told_apart(folder: Path) -> None:
    async with any_call_server(PLAINTEXT) as (server, endpoint):
        link = security_of(folder, PeerRole.PREFILL).link(endpoint, PeerRole.DECODE)
        assert "it speaks plaintext" in str(await failure(link))
        await link.channel.close()
        assert server.reached == []
        plain = PLAINTEXT.link(endpoint, PeerRole.DECODE)
        assert await outcome(plain.channel, ECHO) == "reached"
        await plain.channel.close()


@pytest.mark.parametrize("actual", PeerRole)
@pytest.mark.parametrize("expected", [PeerRole.PREFILL, PeerRole.DECODE, PeerRole.COORDINATOR])
async def test_a_server_is_taken_for_the_role_of_its_certificate_alone(
    folder: Path, actual: PeerRole, expected: PeerRole
) -> None:
    async with any_call_server(security_of(folder, actual)) as (server, endpoint):
        link = security_of(folder, PeerRole.COORDINATOR).link(endpoint, expected)
        if actual is expected:
            assert await outcome(link.channel, ECHO) == "reached"
        else:
            error = await failure(link)
            assert isinstance(error, Unavailable)
            assert f"isn't for {expected}.kvpact" in str(error)
            assert server.reached == []
        await link.channel.close()


async def test_a_server_of_another_ca_is_refused_with_the_file_that_lacks_it(
    folder: Path, other: Path
) -> None:
    async with any_call_server(security_of(other, PeerRole.DECODE)) as (server, endpoint):
        link = security_of(folder, PeerRole.PREFILL).link(endpoint, PeerRole.DECODE)
        error = await failure(link)
        await link.channel.close()
    assert f"isn't signed by a CA in {folder}/ca.crt; was it made by another CA?" in str(error)
    assert server.reached == []


async def test_a_caller_whose_ca_the_server_lacks_is_told_which_file_isn_t_taken(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("prefill.crt", "prefill.key"):
        (mixed / name).write_bytes((other / name).read_bytes())
    both = (other / "ca.crt").read_bytes() + (folder / "ca.crt").read_bytes()
    (mixed / "ca.crt").write_bytes(both)
    async with any_call_server(security_of(folder, PeerRole.DECODE)) as (server, endpoint):
        link = security_of(mixed, PeerRole.PREFILL).link(endpoint, PeerRole.DECODE)
        error = await failure(link)
        await link.channel.close()
    assert f"doesn't take the certificate {mixed}/prefill.crt" in str(error)
    assert "another CA" in str(error)
    assert server.reached == []


async def test_an_address_where_nobody_serves_is_no_matter_of_certificates(folder: Path) -> None:
    async with any_call_server(PLAINTEXT) as (_, endpoint):
        pass
    for security in (PLAINTEXT, security_of(folder, PeerRole.PREFILL)):
        link = security.link(endpoint, PeerRole.DECODE)
        error = await failure(link)
        await link.channel.close()
        assert isinstance(error, Unavailable)
        assert "certificate" not in str(error)


async def test_health_answers_every_certificate_and_nobody_without(folder: Path) -> None:
    server = WorkerServer(security_of(folder, PeerRole.DECODE))
    endpoint = await server.start(bind="127.0.0.1", port=0, advertise_host="127.0.0.1")
    for role in PeerRole:
        link = security_of(folder, role).link(endpoint, PeerRole.DECODE)
        answer = await health_pb2_grpc.HealthStub(link.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await link.channel.close()
    async with stranger(endpoint, folder, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop()


async def test_a_call_that_no_table_lists_is_refused_and_one_that_nobody_serves_is_unknown(
    folder: Path,
) -> None:
    security = security_of(folder, PeerRole.DECODE)
    assert isinstance(security, MutualTls)
    server = security.make_server()

    async def answer(request: object, context: object) -> bytes:
        return b""

    handlers = {"Unlisted": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvpact.v1.Odd", handlers),))
    endpoint = f"127.0.0.1:{security.bind(server, '127.0.0.1:0')}"
    await server.start()
    link = security_of(folder, PeerRole.ADMIN).link(endpoint, PeerRole.DECODE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await link.channel.unary_unary("/kvpact.v1.Odd/Unlisted")(b"")
    assert isinstance(link.failure(caught.value), NotPermitted)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await link.channel.unary_unary("/kvpact.v1.Odd/Unheard")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await link.channel.close()
    await server.stop(None)


async def test_a_port_that_is_taken_is_unavailable(folder: Path) -> None:
    security = security_of(folder, PeerRole.DECODE)
    async with any_call_server(security) as (_, endpoint):
        server = security.make_server([("grpc.so_reuseport", 0)])
        with pytest.raises(Unavailable, match="another process on that port"):
            security.bind(server, endpoint)
