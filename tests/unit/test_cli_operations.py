"""Commands about a coordinator that runs, status, drain, scale and batch: text, JSON, keys, exit codes."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from dataclasses import replace
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
        _, found = await told("status", "--url", cluster.url)
        assert found["ready"] is False
        assert "no decode worker takes requests now" in found["reasons"][0]["message"]


async def test_drain_says_who_is_still_at_work_when_the_time_is_over(tmp_path: Path) -> None:
    async with fake_cluster(make_text_folder(tmp_path), decode=2) as cluster:
        cluster.decode.load = make_load(running=1, waiting=2)
        found = await told("drain", "decode-0", "--url", cluster.url, "--wait", "0.6")
        assert found == (1, {"workers": {"decode-0": 3}, "idle": False})
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

    async def grow(self, role: Role, wanted: int) -> dict[str, str]:
        started = {}
        while role is Role.DECODE and len(self.cluster.decodes) < wanted:
            worker = FakeDecode(self.cluster.script, make_life(f"decode-{len(self.cluster.decodes)}"))
            await worker.start()
            self.cluster.decodes.append(worker)
            await worker.register(self.cluster.grpc_endpoint)
            started[worker.life.worker] = worker.endpoint
        return started

    def beyond(self, role: Role, wanted: int) -> list[str]:
        return [each.life.worker for each in self.cluster.decodes[wanted:]] if role is Role.DECODE else []

    def owns(self, name: str) -> bool:
        return name != "decode-joined"

    async def end(self, name: str) -> None:
        (worker,) = (each for each in self.cluster.decodes if each.life.worker == name)
        self.cluster.decodes.remove(worker)
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
        assert [each.life.worker for each in cluster.decodes] == ["decode-0"]
        code, late = await told("scale", "--prefill", "2", "--url", cluster.url, "--wait", "0")
        assert (code, late["found"]) == (1, {"prefill": 1})
        await joined.die()


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
            {"lines": 2, "done_before": 0, "failed": 0, "output": str(output)},
        )
        assert len(output.read_text().splitlines()) == 2
        more = batch_file(tmp_path / "in.jsonl", "one", "two", [-1])
        assert await batch(more, *words) == (
            101,
            f"3 lines, 2 of them done before, 1 failed; records in {output}\n",
        )


def test_batch_with_a_server_that_is_away_records_it_for_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpact.cli.batch_run.TRIES", 1)
    source, output = batch_file(tmp_path / "in.jsonl", "one"), tmp_path / "out.jsonl"
    answer = CliRunner().invoke(app, ["batch", str(source), str(output), "--url", NOBODY, "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)["failed"]) == (101, 1)
    assert json.loads(output.read_text())["error"]["code"] == "unreachable"
