"""Coordinator, prefill worker and decode worker as plain processes, and requests to them over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import yaml

START_DEADLINE_S = 180.0
REQUEST_DEADLINE_S = 180.0
END_DEADLINE_S = 40.0
POLL_S = 0.2
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Moments of one streamed request, in seconds from its sending."""

    token_ids: tuple[int, ...]
    token_s: tuple[float, ...]
    """When each token arrived."""
    exposed_s: float | None
    """Of its handoff, what came after the prompt was computed; None where it had none."""

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_s[0]

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Three processes that serve one model."""

    host: str
    pids: dict[str, int]
    """By role, and the coordinator's."""

    def ask(self, prompt: list[int], output_tokens: int) -> Answer:
        """Streams a completion of token ids; end tokens are ignored, so that it has `output_tokens`."""
        exposed_before = self._exposed()
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": output_tokens, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0}
        connection = http.client.HTTPConnection(self.host, timeout=REQUEST_DEADLINE_S)
        start_s = perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {answer.read().decode()[:500]}")
        tokens: list[int] = []
        moments: list[float] = []
        for token_ids in _streamed_tokens(answer):
            tokens.extend(token_ids)
            moments.extend([perf_counter() - start_s] * len(token_ids))
        connection.close()
        if len(tokens) != output_tokens:
            raise RuntimeError(f"{len(tokens)} tokens came, expected {output_tokens}")
        exposed_after = self._exposed()
        handed_over = exposed_after[0] > exposed_before[0]
        return Answer(
            token_ids=tuple(tokens),
            token_s=tuple(moments),
            exposed_s=exposed_after[1] - exposed_before[1] if handed_over else None,
        )

    def cpu_share(self, seconds: float) -> dict[str, float]:
        """Of one core, what each process takes while nobody asks anything."""
        before = {name: _cpu_s(pid) for name, pid in self.pids.items()}
        start_s = perf_counter()
        time.sleep(seconds)
        spent_s = perf_counter() - start_s
        return {name: (_cpu_s(pid) - before[name]) / spent_s for name, pid in self.pids.items()}

    def get(self, path: str) -> str:
        """Body of an answer, whatever its status."""
        try:
            with urllib.request.urlopen(f"http://{self.host}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def _exposed(self) -> tuple[int, float]:
        """Handoffs so far, and the sum of their exposed seconds."""
        text = self.get("/metrics")
        name = "kvpact_handoff_exposed_seconds"
        return int(_metric(text, f"{name}_count")), _metric(text, f"{name}_sum")


@contextmanager
def started(model: Path, settings: dict[str, Any]) -> Iterator[Cluster]:
    """Starts the three, waits until they serve, ends them on leaving."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "kvpact.yaml"
        served = {"model": str(model), "served_name": "smollm2", "api": {"port": 0}}
        config.write_text(yaml.safe_dump(settings | served), encoding="utf-8")
        flags = ("--config", str(config))
        line, pid = stack.enter_context(_process("coordinator", flags, says="http://"))
        url, _, endpoint = line.partition(" workers ")
        pids = {"coordinator": pid}
        for role in ROLES:
            worker = _process(f"{role}_worker", (*flags, "--coordinator", endpoint), says="serving ")
            _, pids[role] = stack.enter_context(worker)
        cluster = Cluster(host=url.removeprefix("http://"), pids=pids)
        _wait_ready(cluster)
        yield cluster


@contextmanager
def _process(module: str, flags: tuple[str, ...], *, says: str) -> Iterator[tuple[str, int]]:
    """`python -m MODULE`: the first line of its output that begins with `says`, and its pid."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPACT_")}
    command = [sys.executable, "-m", module, *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdout is not None
        try:
            lines = (line.decode() for line in process.stdout)
            found = next((line for line in lines if line.startswith(says)), None)
            if found is None:
                raise RuntimeError(f"{module} ended: {_tail(log)}")
            yield found.strip(), process.pid
        finally:
            _end(process)
            process.stdout.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(cluster: Cluster) -> None:
    start_s = perf_counter()
    while not json.loads(cluster.get("/ready")).get("ready"):
        if perf_counter() - start_s > START_DEADLINE_S:
            raise RuntimeError(f"not ready: {cluster.get('/ready')}")
        time.sleep(POLL_S)


def _streamed_tokens(lines: Iterable[bytes]) -> Iterator[list[int]]:
    """Token ids of each server-sent event that has some."""
    for line in lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RuntimeError(f"the stream failed: {event['error']}")
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                yield choice["token_ids"]


def _metric(text: str, name: str) -> float:
    """Sum over all labels of a metric; 0 before it was ever set."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode("utf-8", "replace")[-2000:]
