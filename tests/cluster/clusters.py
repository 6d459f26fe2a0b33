"""Real clusters as subprocesses, and what their workers say of themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVPACT = (sys.executable, "-c", "from kvpact.cli.main import main; main()")
STOP_DEADLINE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UpCluster:
    """A running `kvpact up`."""

    url: str
    pid: int
    first_line: dict[str, Any]

    def get(self, path: str) -> dict[str, Any]:
        """Answer of a GET as JSON; an HTTP error's body as well."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer of a POST of JSON. An HTTP error is raised."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Worker name -> its pid, incarnation, counters and blocks, asked of the worker itself."""
        return {worker["worker"]: worker for worker in self.get("/admin/workers")["workers"]}


@contextlib.contextmanager
def up(
    model: Path | str, *flags: str, log: Path, stop: signal.Signals = signal.SIGINT
) -> Iterator[UpCluster]:
    """`kvpact up MODEL` with an ephemeral port; ended by `stop`, which must drain and exit 0."""
    command = [*KVPACT, "up", "--model", str(model), "--port", "0", "--json", *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"no cluster: {log.read_text()[-4000:]}"
            first = json.loads(line)
            assert "url" in first, f"no cluster: {first}"
            yield UpCluster(url=first["url"], pid=process.pid, first_line=first)
        finally:
            process.send_signal(stop)
            code = process.wait(STOP_DEADLINE_S)
            process.stdout.close()
        assert code == 0, f"kvpact up ended with {code}: {log.read_text()[-4000:]}"


def demo(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON object of `kvpact demo --json`."""
    command = [*KVPACT, "demo", "--json", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240)
    assert finished.stdout.count("\n") == 1, f"one line expected: {finished.stdout}{finished.stderr[-4000:]}"
    return finished.returncode, json.loads(finished.stdout)


def environment() -> dict[str, str]:
    """This process's environment, offline."""
    return os.environ | {"HF_HUB_OFFLINE": "1"}
