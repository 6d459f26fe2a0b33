"""Commands about a coordinator that runs, status, drain, scale and batch: text, JSON, keys, exit codes."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.cli.output import console
from kvpact.types import BlockCounts, Role, VerdictWord
from tests.cluster.clusters import KVPACT, environment
from tests.coordinator_fakes import (
    FakeCluster,
    FakeDecode,
    fake_cluster,
    make_life,
    make_load,
    make_text_folder,
    make_verdict,
)

NOBODY = "http://127.0.0.1:9"


async def run(*words: str | Path) -> Result:
    """A command while this loop's cluster serves."""
    return await asyncio.to_thread(CliRunner().invoke, app, [*map(str, words)])


async def told(*words: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and object of a command with --json."""
    answer = await run(*words, "--json")
    assert answer.stdout.count("\n") == 1
    return answer.exit_code, json.loads(answer.stdout)


def refuse(cluster: FakeCluster) -> None:
    cluster.prefill.verdicts = lambda worker: make_verdict(
        VerdictWord.REJECT if worker == "decode-1" else VerdictWord.ACCEPT,
        fields=["inv_freq"] if worker == "decode-1" else [],
    )


async def test_status_shows_workers_pairs_held_blocks_and_why_a_pair_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)
    async with fake_cluster(make_text_folder(tmp_path), decode=2, prepare=refuse) as cluster:
        blocks = BlockCounts(free=60, total=64, held=(("handoff", 4),))
        cluster.decode.load = replace(make_load(running=2), blocks=blocks)
        answer = await run("status", "--url", cluster.url)
        assert answer.exit_code == 0
        assert f"{cluster.url}: ready" in answer.stdout
        for part in ("prefill-0", "60/64", "handoff 4", "inv_freq: inv_freq matters", "serve both with one"):
            assert part in answer.stdout
        code, found = await told("status", "--url", cluster.url)
        assert (code, found["ready"], found["reasons"]) == (0, True, [])
        workers = {each["worker"]: each for each in found["workers"]}
        assert workers["decode-0"]["blocks"]["held"] == {"handoff": 4}
        assert workers["decode-0"]["obstacle"] is None
        assert "they differ in inv_freq" in workers["decode-1"]["obstacle"]
        words = {each["decode"]: each["verdict"] for each in found["pairs"]}
        assert words == {"decode-0": "accept", "decode-1": "reject"}


async def test_a_worker_that_is_drained_is_out_of_use_at_once(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        assert (await told("status", "--url", cluster.url))[1]["ready"] is True
        answer = await run("drain", "decode-0", "--url", cluster.url)
        assert (answer.exit_code, answer.stdout) == (0, "decode-0 is idle and takes no new work\n")
        assert "warning: no decode worker is left that takes requests; start another" in answer.stderr
        _, found = await told("status", "--url", cluster.url)
        assert found["ready"] is False
        told_why = found["reasons"][0]["message"]
        assert "no decode worker takes requests now: decode-0 is draining; start another" in told_why
        await cluster.decode.die()
        await cluster.prefill.die()
        _, found = await told("status", "--url", cluster.url)
        troubles = {each["worker"]: each["trouble"] for each in found["workers"]}
        assert troubles["decode-0"].startswith("was draining and has ended, or ")
        assert not troubles["prefill-0"].startswith("was draining")


async def test_drain_says_who_is_still_at_work_when_the_time_is_over(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        cluster.decode.load = make_load(running=1, waiting=2)
        found = await told("drain", "decode-0", "--url", cluster.url, "--wait", "0.6")
        assert found == (1, {"workers": {"decode-0": 3}, "idle": False})
        answer = await run("drain", "decode-0", "--url", cluster.url, "--wait", "0")
        assert "warning" not in answer.stderr
        cluster.decode.load = make_load()
        host = cluster.decode.endpoint.partition(":")[0]
        code, all_of_them = await told("drain", host, "--url", cluster.url)
        assert (code, all_of_them["idle"]) == (0, True)
        assert set(all_of_them["workers"]) == {"prefill-0", "decode-0", "decode-1"}
        code, unknown = await told("drain", "nobody", "--url", cluster.url)
        assert code == 2
        assert "known: decode-0, decode-1, prefill-0" in unknown["error"]["message"]


class FakeCrew:
    """Starts and ends fake decode workers."""

    cluster: FakeCluster

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    async def until(self, names: list[str]) -> None:
        """Waits until these decode workers are left."""
        while self.of_role(Role.DECODE) != names:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)

    async def grow(self, role: Role, wanted: int) -> dict[str, str]:
        started = {}
        while role is Role.DECODE and len(self.cluster.decodes) < wanted:
            taken = self.of_role(role)
            name = next(name for index in count() if (name := f"decode-{index}") not in taken)
            worker = FakeDecode(self.cluster.script, make_life(name, 2))
            await worker.start()
            self.cluster.decodes.append(worker)
            await worker.register(self.cluster.grpc_endpoint)
            started[worker.life.worker] = worker.endpoint
            self.changed.set()
        return started

    def of_role(self, role: Role) -> list[str]:
        return [each.life.worker for each in self.cluster.decodes] if role is Role.DECODE else []

    def owns(self, name: str) -> bool:
        return name != "decode-joined"

    async def end(self, name: str) -> None:
        (worker,) = (each for each in self.cluster.decodes if each.life.worker == name)
        self.cluster.decodes.remove(worker)
        self.changed.set()
        await worker.die()


async def test_scale_waits_until_there_are_as_many_as_asked(tmp_path: Path) -> None:
    crew = FakeCrew()
    async with fake_cluster(make_text_folder(tmp_path), crew=crew) as cluster:
        crew.cluster = cluster
        joined = FakeDecode(cluster.script, make_life("decode-joined"))
        await joined.start()
        await joined.register(cluster.grpc_endpoint)
        grown = await told("scale", "--decode", "2", "--url", cluster.url, "--wait", "30")
        assert grown == (0, {"wanted": {"decode": 2}, "found": {"decode": 2}, "leaving": []})
        answer = await run("scale", "--decode", "1", "--url", cluster.url, "--wait", "30")
        assert (answer.exit_code, answer.stdout) == (0, "1 decode workers serve\n")
        await crew.until(["decode-0"])
        answer = await run("scale", "--decode", "1", "--url", cluster.url)
        assert answer.stdout == "1 decode workers serve; nothing to change\n"
        assert "starting workers" not in answer.stderr
        code, late = await told("scale", "--prefill", "2", "--url", cluster.url, "--wait", "0")
        assert (code, late["found"]) == (1, {"prefill": 1})
        await joined.die()


async def test_scale_ends_a_drained_worker_first_and_doesn_t_count_it(tmp_path: Path) -> None:
    crew = FakeCrew()
    async with fake_cluster(make_text_folder(tmp_path), decode=2, crew=crew) as cluster:
        crew.cluster = cluster
        await run("drain", "decode-0", "--url", cluster.url)
        shrunk = await told("scale", "--decode", "1", "--url", cluster.url, "--wait", "30")
        assert shrunk == (0, {"wanted": {"decode": 1}, "found": {"decode": 1}, "leaving": ["decode-0"]})
        await crew.until(["decode-1"])
        await run("drain", "decode-1", "--url", cluster.url)
        again = await told("scale", "--decode", "1", "--url", cluster.url, "--wait", "30")
        assert again == (0, {"wanted": {"decode": 1}, "found": {"decode": 1}, "leaving": ["decode-1"]})
        await crew.until(["decode-0"])
        await crew.end("decode-0")


async def test_scale_says_what_it_lacks(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path)) as cluster:
        code, answer = await told("scale", "--url", cluster.url)
        assert (code, "say how many" in answer["error"]["message"]) == (2, True)
        code, answer = await told("scale", "--decode", "2", "--url", cluster.url)
        assert (code, "aren't started by this coordinator" in answer["error"]["message"]) == (2, True)


ORDERS = [("status",), ("drain", "decode-0"), ("scale", "--decode", "1")]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
async def test_only_an_admin_key_opens_the_commands_where_one_is_set(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    keys: dict[str, Any] = {"api_keys": ("user",), "admin_keys": ("operator",)}
    crew = FakeCrew()
    async with fake_cluster(make_text_folder(tmp_path), crew=crew, **keys) as cluster:
        crew.cluster = cluster
        found = []
        for key in (None, "wrong", "operator"):
            file = tmp_path / "key"
            file.write_text(f"{key}\n")
            words = [] if key is None else ["--admin-key-file", file]
            answer = await run(*order, "--url", cluster.url, *words)
            found.append(answer.exit_code)
            assert ("see --admin-key-file" in answer.stderr) == (key != "operator")
        assert found == [2, 2, 0]
        code, missing = await told(*order, "--url", cluster.url, "--admin-key-file", tmp_path / "nowhere")
        assert (code, "can't read the key" in missing["error"]["message"]) == (3, True)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
async def test_a_coordinator_that_is_away_is_named(order: tuple[str, ...]) -> None:
    answer = await run(*order, "--url", NOBODY)
    assert answer.exit_code == 1
    assert f"no coordinator answers at {NOBODY}" in answer.stderr
    code, error = await told(*order, "--url", NOBODY)
    assert (code, error["error"]["reason"]) == (1, "UNAVAILABLE")


class SomethingElse(BaseHTTPRequestHandler):
    """Answers whatever it is asked with an object of its own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"name": "something else"}')

    def log_message(self, format: str, *args: object) -> None:
        return


async def test_a_server_that_is_something_else_is_no_coordinator(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SomethingElse) as server:
        serving = asyncio.create_task(asyncio.to_thread(server.serve_forever, 0.01))
        url = f"http://127.0.0.1:{server.server_port}"
        answer = await run("status", "--url", url)
        server.shutdown()
        await serving
    assert answer.exit_code == 1
    assert f"{url} isn't a kvpact coordinator" in answer.stderr


async def batch(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of `kvpact batch`, which handles signals and so wants a process of its own."""
    command = [*KVPACT, "batch", *map(str, words)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=environment())
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def batch_file(path: Path, *prompts: Any) -> Path:
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 3},
        }
        for number, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def test_batch_goes_through_a_server_that_runs_and_tells_how_many_failed(tmp_path: Path) -> None:
    key, output = tmp_path / "key", tmp_path / "out.jsonl"
    key.write_text("user")
    async with fake_cluster(make_text_folder(tmp_path), api_keys=("user",)) as cluster:
        words = [output, "--url", cluster.url, "--api-key-file", key]
        good = batch_file(tmp_path / "in.jsonl", "one", "two")
        code, summary = await batch(good, *words, "--json")
        assert (code, json.loads(summary)) == (
            0,
            {"lines": 2, "done_before": 0, "failed": 0, "failures": {}, "output": str(output)},
        )
        assert len(output.read_text().splitlines()) == 2
        more = batch_file(tmp_path / "in.jsonl", "one", "two", [-1])
        assert await batch(more, *words) == (
            101,
            f"3 lines, 2 of them done before, 1 failed: 1 HTTP 400 (line 3); records in {output}\n",
        )
        batch_file(more, "one", "two", *([-1] * 25))
        code, summary = await batch(more, *words, "--retry-failed", "--json")
        assert (code, json.loads(summary)["failures"]) == (120, {"http_400": [*range(3, 28)]})
        batch_file(more, "one", "two", "three")
        assert (await batch(more, *words, "--retry-failed"))[0] == 0


def test_batch_with_a_server_that_is_away_records_nothing(tmp_path: Path) -> None:
    source, output = batch_file(tmp_path / "in.jsonl", "one"), tmp_path / "out.jsonl"
    answer = CliRunner().invoke(app, ["batch", str(source), str(output), "--url", NOBODY, "--json"])
    assert answer.exit_code == 1
    assert f"no server answers at {NOBODY}: " in json.loads(answer.stdout)["error"]["message"]
    assert not output.exists()


async def test_batch_without_the_key_that_is_needed_stops_at_the_first_answer(tmp_path: Path) -> None:
    source, output = batch_file(tmp_path / "in.jsonl", *"abcd"), tmp_path / "out.jsonl"
    async with fake_cluster(make_text_folder(tmp_path), api_keys=("user",)) as cluster:
        code, told = await batch(source, output, "--url", cluster.url, "--json")
        assert (code, "see --api-key-file" in json.loads(told)["error"]["message"]) == (2, True)
        assert output.read_text() == ""


async def test_batch_that_is_ended_by_a_signal_says_how_far_it_is(tmp_path: Path) -> None:
    source, output = batch_file(tmp_path / "in.jsonl", "one", "two"), tmp_path / "out.jsonl"
    under_way = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        else:
            under_way.set()
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        command = [*KVPACT, "batch", str(source), str(output), "--url", f"http://127.0.0.1:{port}"]
        process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, env=environment())
        await asyncio.wait_for(under_way.wait(), 60)
        process.terminate()
        _, told = await process.communicate()
    assert process.returncode == 130
    assert "ended; 0 of 2 lines done; run the same command to go on" in told.decode()
