"""Coordinator and workers as plain processes that a test may kill, stop and restart at the same address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvpact.handoff import codec
from kvpact.handoff.messages import WorkerDescription
from kvpact.v1 import handoff_pb2, handoff_pb2_grpc
from tests.cluster.clusters import STOP_DEADLINE_S, UpCluster, environment
from tests.cluster.waiting import eventually

ASK_DEADLINE_S = 5.0


@dataclass(slots=True, kw_only=True)
class Served:
    """One process of `python -m module`, over all its lives."""

    module: str
    flags: tuple[str, ...]
    says: str
    """How its first line begins that says where it serves."""
    log: Path
    running: subprocess.Popen[bytes] | None = None
    lives: int = 0

    def launch(self, *more: str) -> None:
        """Starts a life; `serving` waits for it."""
        assert self.running is None
        self.lives += 1
        with self._log().open("wb") as output:
            self.running = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.flags, *more],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    def serving(self) -> str:
        """The line that says where it serves."""

        def said() -> str:
            assert self.running is not None
            text = self._log().read_text(errors="replace")
            assert self.running.poll() is None, text[-3000:]
            return next((line for line in text.splitlines() if line.startswith(self.says)), "")

        return eventually(said)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the life that runs."""
        assert self.running is not None
        os.kill(self.running.pid, number)

    def kill(self) -> None:
        """Ends it without a word."""
        self.send(signal.SIGKILL)
        assert self.running is not None
        self.running.wait(STOP_DEADLINE_S)
        self.running = None

    def stop(self) -> None:
        """Ends it as a person would; it must end well."""
        if self.running is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        running, self.running = self.running, None
        try:
            code = running.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            running.kill()
            code = running.wait()
        text = self._log().read_text(errors="replace")
        assert code == 0, f"{self.module} ended with {code}: {text[-3000:]}"
        assert "Traceback" not in text, text[-3000:]

    def _log(self) -> Path:
        return self.log.with_suffix(f".{self.lives}.log")


@dataclass(slots=True, kw_only=True)
class Processes:
    """One worker of each role and a coordinator, without Ray."""

    coordinator: Served
    prefill: Served
    decode: Served
    url: str = ""
    endpoints: dict[str, str] = field(default_factory=dict)
    """Module -> host:port, the same in every life."""

    def cluster(self) -> UpCluster:
        """What HTTP says of it."""
        assert self.coordinator.running is not None
        return UpCluster(url=self.url, pid=self.coordinator.running.pid, first_line={})

    def ready(self) -> bool:
        """Whether a pair of workers is usable."""
        return bool(self.cluster().get("/ready")["ready"])

    def restart(self, worker: Served) -> None:
        """Another life of a killed worker at its old address."""
        worker.launch("--port", self.endpoints[worker.module].rsplit(":", 1)[1])
        assert worker.serving().split()[-1] == self.endpoints[worker.module]

    def describe(self, worker: Served) -> WorkerDescription:
        """What a worker says of itself."""
        with grpc.insecure_channel(self.endpoints[worker.module]) as channel:
            stub = handoff_pb2_grpc.WorkerServiceStub(channel)
            return codec.decode_description(
                stub.Describe(handoff_pb2.DescribeRequest(), timeout=ASK_DEADLINE_S)
            )

    def held_blocks(self, worker: Served) -> int:
        """Blocks of a worker that aren't free."""
        counts = self.describe(worker).load.blocks
        return counts.total - counts.free


@contextmanager
def processes(model: Path, config: Path, logs: Path) -> Iterator[Processes]:
    """All three, ready."""
    flags = ("--model", str(model), "--config", str(config))
    coordinator = Served(
        module="coordinator", flags=(*flags, "--port", "0"), says="http://", log=logs / "coordinator"
    )
    workers = [
        Served(module=f"{role}_worker", flags=flags, says="serving ", log=logs / role)
        for role in ("prefill", "decode")
    ]
    made = Processes(coordinator=coordinator, prefill=workers[0], decode=workers[1])
    try:
        coordinator.launch()
        made.url, registry = coordinator.serving().split(" workers ")
        for worker in workers:
            worker.flags = (*flags, "--coordinator", registry)
            worker.launch()
        for worker in workers:
            made.endpoints[worker.module] = worker.serving().split()[-1]
        eventually(made.ready)
        yield made
    finally:
        with ExitStack() as stack:
            for each in (coordinator, *workers):
                stack.callback(each.stop)
