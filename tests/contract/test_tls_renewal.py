"""New certificate files over real connections: used by what begins after them, not felt by what runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from kvpact.handoff.channel_transport import RenewedChannel
from kvpact.tls import PeerRole
from tests.tls_calls import ECHO, TICKS, any_call_server, failure, outcome
from tests.tls_files import make_certificates, security_of

SERVER, CALLER = PeerRole.PREFILL, PeerRole.COORDINATOR


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "certs")


@pytest.fixture
def before(folder: Path, tmp_path: Path) -> Path:
    """The first certificates, kept."""
    return Path(shutil.copytree(folder, tmp_path / "before"))


async def test_a_stream_ends_on_the_old_files_while_calls_beside_it_use_the_new(
    folder: Path, before: Path
) -> None:
    async with any_call_server(security_of(folder, SERVER)) as (server, endpoint):
        server.go_on.clear()
        channel = security_of(folder, CALLER).link(endpoint, SERVER).channel
        running = channel.unary_stream(TICKS)(b"")
        assert await running.read() == b"first"
        make_certificates(folder)
        assert await outcome(channel, ECHO) == "reached"
        server.go_on.set()
        assert await running.read() == b"last"
        assert await running.read() is grpc.aio.EOF
        await channel.close()


async def test_after_the_change_a_new_connection_with_the_old_files_is_refused(
    folder: Path, before: Path
) -> None:
    async with any_call_server(security_of(folder, SERVER)) as (_, endpoint):
        kept = security_of(before, CALLER)
        link = kept.link(endpoint, SERVER)
        assert await outcome(link.channel, ECHO) == "reached"
        make_certificates(folder)
        late = kept.link(endpoint, SERVER)
        assert "isn't signed by a CA" in str(await failure(late))
        assert await outcome(link.channel, ECHO) == "reached", "an open connection stays"
        await link.channel.close()
        await late.channel.close()


async def test_a_caller_whose_files_change_under_the_same_ca_opens_one_new_channel(folder: Path) -> None:
    async with any_call_server(security_of(folder, SERVER)) as (_, endpoint):
        channel = security_of(folder, CALLER).link(endpoint, SERVER).channel
        assert isinstance(channel, RenewedChannel)
        first = channel.opened()
        assert await outcome(channel, ECHO) == "reached"
        assert channel.opened() is first
        make_certificates(folder)
        second = channel.opened()
        assert second is not first
        assert await outcome(channel, ECHO) == "reached"
        assert channel.opened() is second
        with pytest.raises(grpc.aio.UsageError):
            await first.channel.unary_unary(ECHO)(b"")
        await channel.close()


@pytest.mark.parametrize("half", ["{role}.key", "{role}.crt", "ca.crt"])
async def test_half_written_files_on_either_side_leave_old_connections_and_new_ones_alone(
    folder: Path, before: Path, tmp_path: Path, half: str
) -> None:
    other = make_certificates(tmp_path / "other")
    async with any_call_server(security_of(folder, SERVER)) as (_, endpoint):
        link = security_of(folder, CALLER).link(endpoint, SERVER)
        assert await outcome(link.channel, ECHO) == "reached"
        for role in (SERVER, CALLER):
            name = half.format(role=role)
            (folder / name).write_bytes((other / name).read_bytes()[:200])
        assert await outcome(link.channel, ECHO) == "reached"
        late = security_of(before, CALLER).link(endpoint, SERVER)
        assert await outcome(late.channel, ECHO) == "reached"
        shutil.copytree(other, folder, dirs_exist_ok=True)
        assert await outcome(link.channel, ECHO) == "reached"
        latest = security_of(other, CALLER).link(endpoint, SERVER)
        assert await outcome(latest.channel, ECHO) == "reached"
        for each in (link, late, latest):
            await each.channel.close()


async def test_a_renewed_channel_is_a_channel_in_the_other_ways_too(folder: Path) -> None:
    async with any_call_server(security_of(folder, SERVER)) as (_, endpoint):
        async with security_of(folder, CALLER).link(endpoint, SERVER).channel as channel:
            await channel.channel_ready()
            assert channel.get_state() is grpc.ChannelConnectivity.READY
        with pytest.raises(grpc.aio.UsageError):
            await channel.unary_unary(ECHO)(b"")
