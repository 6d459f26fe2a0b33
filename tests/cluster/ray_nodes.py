"""A Ray cluster of several nodes on one machine: a head with a dashboard, and nodes with labels."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.waiting import eventually

RAY = str(Path(sys.executable).with_name("ray"))
ROOT = Path(__file__).parents[2]
START_S = 120.0
STOP_S = 20.0
LOWEST_PORT = 20001
"""Ray gives lower ones to its own workers."""


@dataclass(slots=True)
class RayNodes:
    """Nodes that run; the head has no cores."""

    folder: Path
    environment: dict[str, str]
    port: int
    dashboard: str
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """host:port of the head, for --address."""
        return f"127.0.0.1:{self.port}"

    def start_head(self) -> None:
        """Starts the head and waits for its dashboard."""
        self._start(
            "head",
            "--head",
            f"--port={self.port}",
            "--num-cpus=0",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard.rpartition(':')[2]}",
        )
        eventually(lambda: _answers(self.dashboard), START_S)
        eventually(lambda: self._joined("head"), START_S)

    def add(self, name: str, labels: Mapping[str, str], *, cores: int = 1) -> None:
        """Starts one more node and waits until it has joined."""
        text = ",".join(f"{key}={value}" for key, value in labels.items())
        self._start(name, f"--address={self.address}", f"--num-cpus={cores}", f"--labels={text}")
        eventually(lambda: self._joined(name), START_S)

    def kill(self, name: str) -> None:
        """Ends a node as a power cut would, its actors included."""
        process = self.nodes.pop(name)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(STOP_S)

    def alive(self) -> list[str]:
        """Ids of the nodes that have joined and live."""
        token = self.environment["RAY_AUTH_TOKEN"]
        request = urllib.request.Request(
            f"{self.dashboard}/api/v0/nodes", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found = json.load(answer)["data"]["result"]["result"]
        except (OSError, KeyError, TypeError):
            return []
        return [node["node_id"] for node in found if node["state"] == "ALIVE"]

    def stop(self) -> None:
        """Ends every node, the head last."""
        for name in reversed(list(self.nodes)):
            process = self.nodes[name]
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            for member in [*family, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait(STOP_S)

    def job(self, *entrypoint: str) -> subprocess.Popen[str]:
        """`ray job submit` of a command from the project's folder; its log comes on standard output."""
        command = [RAY, "job", "submit", "--address", self.dashboard, "--working-dir", str(ROOT), "--"]
        return subprocess.Popen(
            [*command, *entrypoint],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )

    def _joined(self, name: str) -> bool:
        """Whether as many nodes live as were started; `name` is the last of them."""
        ended = self.nodes[name].poll()
        assert ended is None, (
            f"{name} ended with {ended}: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        )
        return len(self.alive()) >= len(self.nodes)

    def _start(self, name: str, *flags: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        command = [RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        self.nodes[name] = subprocess.Popen(
            [*command, "--dashboard-agent-listen-port=0", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment,
        )
        log.close()


@contextlib.contextmanager
def ray_nodes(folder: Path, nodes: Mapping[str, Mapping[str, str]]) -> Iterator[RayNodes]:
    """A head and `nodes`, name -> labels, with token authentication."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    running = RayNodes(
        folder=folder,
        environment=os.environ | token | {"HF_HUB_OFFLINE": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        port=free_port(),
        dashboard=f"http://127.0.0.1:{free_port()}",
    )
    try:
        running.start_head()
        for name, labels in nodes.items():
            running.add(name, labels)
        yield running
    finally:
        running.stop()


def free_port() -> int:
    """A port that nobody listens on now, above those that Ray gives to its workers."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port >= LOWEST_PORT:
            return port


def _answers(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
