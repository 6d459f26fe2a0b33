"""A client that leaves takes its work along; a coordinator that stops lets running work end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.coordinator_fakes import FakeCluster, fake_cluster, make_text_folder


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(make_text_folder(tmp_path)) as running:
        yield running


async def connect(
    cluster: FakeCluster, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a completion request on a socket of its own."""
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"prompt": "x", "max_tokens": 20} | body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    """Closes the connection without a word."""
    writer.close()
    await writer.wait_closed()


async def all_released(cluster: FakeCluster) -> None:
    """Waits until both workers were told to give the only handoff up."""
    for worker in (cluster.prefill, cluster.decode):
        await worker.released_now.wait()
        assert worker.released == [(cluster.prefill.requests[0].handoff_id, "cancelled")]


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_tokens_come_cancels_and_releases(cluster: FakeCluster, stream: bool) -> None:
    cluster.decode.hold_after = 3
    _, writer = await connect(cluster, {"stream": stream})
    await cluster.decode.holding.wait()
    await leave(writer)
    await cluster.decode.cancelled.wait()
    await all_released(cluster)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_cancels_and_releases(
    cluster: FakeCluster, stream: bool
) -> None:
    cluster.prefill.hold = True
    _, writer = await connect(cluster, {"stream": stream})
    await cluster.prefill.holding.wait()
    await leave(writer)
    await cluster.prefill.cancelled.wait()
    await all_released(cluster)


async def test_leaving_with_several_prompts_cancels_them_all(cluster: FakeCluster) -> None:
    cluster.decode.hold_after = 1
    _, writer = await connect(cluster, {"prompt": ["a", "b", "c"], "stream": True})
    await cluster.decode.count(cluster.decode.requests, 3)
    await leave(writer)
    await cluster.decode.count(cluster.decode.released, 3)


async def test_a_client_that_left_is_counted_as_cancelled_and_leaves_nothing_running(
    cluster: FakeCluster,
) -> None:
    cluster.decode.hold_after = 3
    _, writer = await connect(cluster, {"stream": True})
    await cluster.decode.holding.wait()
    await leave(writer)
    await all_released(cluster)
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        text = (await http.get("/metrics")).text
    assert 'finish_reason="cancelled"} 1.0' in text.replace('code="",', "")
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in text


async def test_stopping_lets_a_running_stream_end_and_takes_no_new_one(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        cluster.decode.hold_after = 3
        reader, writer = await connect(cluster, {"stream": True})
        await cluster.decode.holding.wait()
        stopping = asyncio.ensure_future(cluster.coordinator.stop())
        await cluster.coordinator._http._server.leave.wait()
        cluster.decode.go_on.set()
        text = (await reader.read()).decode()
        await stopping
        assert text.count("data: {") == 20
        assert "data: [DONE]" in text
        assert cluster.decode.released == []
        with pytest.raises(OSError, match="Connect call failed"):
            await connect(cluster, {})
        await leave(writer)


async def test_stopping_twice_is_stopping_once(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        await cluster.coordinator.stop()
        await cluster.coordinator.stop()
