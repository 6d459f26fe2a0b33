"""Batch files: which lines are sent, what is recorded, and what a second run does again."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpact.cli import batch_file
from kvpact.cli.batch import key_to_show
from kvpact.cli.batch_file import Answer, Broken, Job, answered, failed, finished, read_jobs, unsent
from kvpact.cli.batch_output import BatchOutput
from kvpact.cli.batch_run import TRIES, Client, check_key, run_lines
from kvpact.cli.batch_tally import Tally
from kvpact.config import ApiConfig, Config
from kvpact.errors import BadRequest, UnreadableSource

URL = "/v1/completions"


def line(number: int, **changes: Any) -> str:
    request = {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": {"prompt": "a"}}
    return json.dumps(request | changes)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(each + "\n" for each in lines))
    return path


def job(number: int) -> Job:
    return Job(line=number, custom_id=f"r{number}", url=URL, body={"prompt": "a"})


def good(number: int) -> dict[str, Any]:
    return answered(job(number), Answer(status=200, request_id="x", body={"ok": number}))


def test_lines_come_in_order_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    found = list(read_jobs(write(tmp_path / "in", line(1), "", line(3))))
    assert found == [job(1), job(3)]


@pytest.mark.parametrize(
    ("text", "custom_id", "problem"),
    [
        ("{", None, "no JSON object"),
        ("[]", None, "no JSON object"),
        ("[" * 100_000, None, "no JSON object"),
        ("\udcff", None, "no JSON object"),
        (line(1, custom_id=7), None, "custom_id"),
        (line(1, method="GET"), "r1", "method is 'GET'"),
        (line(1, url="/v1/embeddings"), "r1", "url is '/v1/embeddings'"),
        (line(1, body=[]), "r1", "body"),
        (line(1, body={"stream": True}), "r1", "stream"),
    ],
)
def test_a_bad_line_is_told_and_the_next_is_sent(
    tmp_path: Path, text: str, custom_id: str | None, problem: str
) -> None:
    path = tmp_path / "in"
    path.write_bytes(text.encode(errors="surrogateescape") + b"\n" + line(2).encode() + b"\n")
    bad, following = read_jobs(path)
    assert isinstance(bad, Broken)
    assert (bad.line, bad.custom_id) == (1, custom_id)
    assert problem in bad.problem
    assert following == job(2)


def test_a_line_beyond_the_limit_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 200)
    bad, following = read_jobs(write(tmp_path / "in", line(1, body={"prompt": "a" * 1000}), line(2)))
    assert isinstance(bad, Broken)
    assert "longer than 200 bytes" in bad.problem
    assert following == job(2)


def test_a_custom_id_that_comes_again_is_told(tmp_path: Path) -> None:
    first, again = read_jobs(write(tmp_path / "in", line(1), line(2, custom_id="r1")))
    assert first == job(1)
    assert isinstance(again, Broken)
    assert "that of line 1" in again.problem


def test_a_file_that_is_absent_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="no-such-file"):
        list(read_jobs(tmp_path / "no-such-file"))


def test_what_counts_as_failed_and_as_final() -> None:
    refused = answered(job(1), Answer(status=400, request_id="x", body={}))
    full = answered(job(1), Answer(status=503, request_id="x", body={}))
    broken = unsent(1, None, code="invalid_line", message="bad")
    gone = unsent(1, "r1", code="unreachable", message="gone")
    assert [failed(record) for record in (good(1), refused, full, broken, gone)] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert [finished(record) for record in (good(1), refused, full, broken, gone)] == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_second_run_does_only_what_has_no_final_record(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        for record in (good(1), unsent(2, "r2", code="unreachable", message="gone"), good(3)):
            output.append(record)
    with path.open("ab") as file:
        file.write(b'{"id": "half')
    with BatchOutput(path) as output:
        assert [number for number in (1, 2, 3, 4) if output.is_due(job(number))] == [2, 4]
        output.append(good(2))
    records = [json.loads(each) for each in path.read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 3, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_lines_that_a_wrong_key_kept_out_are_due_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        for status in (401, 403, 404):
            output.append(answered(job(status), Answer(status=status, request_id="x", body={})))
    with BatchOutput(path) as output:
        assert [status for status in (401, 403, 404) if output.is_due(job(status))] == [401, 403]
        assert output.tally.failed == 1


def test_a_file_that_another_run_just_replaced_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"half")
    lock = BatchOutput._lock

    def late(self: BatchOutput, file: Any) -> None:
        monkeypatch.setattr(BatchOutput, "_lock", lock)
        with BatchOutput(path):
            pass
        lock(self, file)

    monkeypatch.setattr(BatchOutput, "_lock", late)
    with pytest.raises(BadRequest, match="written by another run"), BatchOutput(path):
        pass
    with BatchOutput(path) as output:
        output.append(good(1))
    assert json.loads(path.read_text())["line"] == 1


def test_a_cluster_of_the_batch_s_own_is_shown_a_key_that_it_asks_for_and_other_servers_are_not() -> None:
    keyed, open_to_all = Config(api=ApiConfig(api_keys=("a", "b"))), Config()
    assert [key_to_show(named, None, keyed) for named in (None, "mine")] == ["a", "mine"]
    assert key_to_show(None, None, open_to_all) is None
    assert key_to_show(None, "http://elsewhere", keyed) is None


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with (
        pytest.raises(UnreadableSource, match="No space left on device"),
        BatchOutput(tmp_path / "a") as output,
    ):
        output.append(good(1))
    (tmp_path / "b").write_bytes(b"half")
    with pytest.raises(UnreadableSource, match="No space left on device"), BatchOutput(tmp_path / "b"):
        pass
    assert (tmp_path / "b").read_bytes() == b"half"


def test_a_run_that_is_killed_while_it_takes_up_a_file_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    whole = json.dumps(good(1)).encode() + b"\n"
    path.write_bytes(whole + b"half")

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), BatchOutput(path):
        pass
    assert path.read_bytes() == whole + b"half"


def test_output_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(good(1))
    other = Job(line=1, custom_id="other", url=URL, body={})
    with BatchOutput(path) as output, pytest.raises(BadRequest, match="belongs to another batch"):
        output.is_due(other)


def test_failed_lines_are_done_again_where_asked_and_their_records_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(good(1))
        output.append(unsent(2, None, code="invalid_line", message="bad"))
        assert output.tally.failures() == {"invalid_line": [2]}
    with BatchOutput(path) as output, pytest.raises(BadRequest, match="add --retry-failed"):
        output.is_due(job(2))
    with BatchOutput(path, retry_failed=True) as output:
        assert [number for number in (1, 2) if output.is_due(job(number))] == [2]
        output.append(good(2))
        assert (output.tally.lines, output.tally.failed) == (2, 0)
    assert [json.loads(each)["line"] for each in path.read_text().splitlines()] == [1, 2]


def test_a_line_that_was_answered_is_never_taken_for_a_corrected_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(good(1))
    other = Job(line=1, custom_id="other", url=URL, body={})
    with BatchOutput(path, retry_failed=True) as output, pytest.raises(BadRequest) as refused:
        output.is_due(other)
    assert "--retry-failed" not in str(refused.value)


def test_failures_are_told_by_reason_with_their_lines() -> None:
    tally = Tally()
    for record in (
        *(unsent(number, None, code="invalid_line", message="bad") for number in (10, 4, 8)),
        answered(job(6), Answer(status=400, request_id="x", body={})),
        good(1),
    ):
        tally.add(record)
    assert (tally.lines, tally.failed) == (5, 4)
    assert tally.failures() == {"invalid_line": [4, 8, 10], "http_400": [6]}
    assert tally.text() == "4 failed: 3 invalid_line (lines 4, 8, 10), 1 HTTP 400 (line 6)"
    assert Tally().text() == "0 failed"
    for number in range(11, 31):
        tally.add(unsent(number, None, code="unreachable", message="gone"))
    assert "20 unreachable (lines 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, ...)" in tally.text()


@pytest.mark.parametrize("status", [200, 400, 401, 403])
def test_an_answer_that_refuses_the_key_ends_the_run(status: int) -> None:
    body = {"error": {"message": "a valid key is needed"}}
    record = answered(job(1), Answer(status=status, request_id="x", body=body))
    if status in (200, 400):
        check_key(record)
        return
    with pytest.raises(BadRequest, match=f"{status}: a valid key is needed; see --api-key-file"):
        check_key(record)


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "out", "dear diary")
    with pytest.raises(UnreadableSource, match="line 1, is no record"), BatchOutput(path):
        pass
    assert path.read_text() == "dear diary\n"


def test_two_runs_on_one_output_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"half")
    with BatchOutput(path), pytest.raises(BadRequest, match="written by another run"), BatchOutput(path):
        pass
    with BatchOutput(path):
        pass


async def test_every_line_has_one_outcome_and_few_are_under_way() -> None:
    running, most = 0, 0

    async def send(each: Job) -> Answer:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1
        if each.line == 3:
            raise httpx.ConnectError("refused")
        return Answer(status=200, request_id="x", body={})

    lines = [*map(job, range(1, 7)), Broken(line=7, custom_id=None, problem="bad")]
    records = {record["line"]: record async for record in run_lines(lines, send, at_once=2)}
    assert most == 2
    assert sorted(records) == [1, 2, 3, 4, 5, 6, 7]
    assert records[3]["error"]["code"] == "unreachable"
    assert records[7]["error"]["code"] == "invalid_line"
    assert sum(map(failed, records.values())) == 2


async def test_leaving_a_run_ends_what_is_under_way() -> None:
    ended: list[int] = []

    async def send(each: Job) -> Answer:
        if each.line == 1:
            return Answer(status=200, request_id="x", body={})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(each.line)
        raise AssertionError

    outcomes = run_lines(map(job, range(1, 4)), send, at_once=3)
    assert (await anext(outcomes))["line"] == 1
    await outcomes.aclose()
    assert sorted(ended) == [2, 3]


class Server:
    """Answers by a script; the last entry stays."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.calls = 0
        self.pauses: list[float] = []

    async def send(self) -> Answer:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(self._answer), base_url="http://s"
        ) as http:
            return await Client(http, sleep=self._pause).send(job(1))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def test_a_full_server_is_asked_again_after_the_pause_it_asks_for() -> None:
    server = Server(
        httpx.Response(429, headers={"retry-after": "7"}),
        httpx.ConnectError("restarting"),
        httpx.Response(200, json={"ok": 1}, headers={"x-request-id": "q"}),
    )
    assert await server.send() == Answer(status=200, request_id="q", body={"ok": 1})
    assert server.pauses == [7.0, 1.0]


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(400, json={}), httpx.Response(503, json={}, headers={"x-should-retry": "false"})],
)
async def test_an_answer_that_stays_so_is_taken_at_once(answer: httpx.Response) -> None:
    server = Server(answer)
    assert (await server.send()).status == answer.status_code
    assert server.calls == 1


async def test_a_server_that_stays_full_or_away_is_given_up() -> None:
    full = Server(httpx.Response(503, text="no JSON"))
    assert (await full.send()).body == {"error": {"message": "no JSON"}}
    assert full.calls == TRIES
    away = Server(httpx.ConnectError("refused"))
    with pytest.raises(httpx.ConnectError):
        await away.send()
    assert away.calls == TRIES
