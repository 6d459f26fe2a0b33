"""The two ends of a path as processes of their own, asked by JSON lines over their standard streams."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

DEADLINE_S = 120.0
LOG_TAIL_CHARS = 2000
Facts = dict[str, Any]


class Missing(Exception):
    """This machine or this build has no such path; the text says why and what would mend it."""


class PathBroke(Exception):
    """An end failed; the text has its error and the tail of its log."""


class Near(Protocol):
    """The end that writes."""

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """Makes ready for payloads of up to `most_bytes`; `facts` are what the far end gave."""

    async def carry(self, payload_bytes: int) -> float:
        """Carries that many bytes over; seconds until they are in the far end's memory, and known to be."""

    async def close(self) -> None:
        """Ends what `open` began."""


class Far(Protocol):
    """The end that takes in."""

    async def open(self, most_bytes: int) -> Facts:
        """Makes ready; facts for the near end. Raises Missing where there is no such path."""

    async def expect(self, payload_bytes: int) -> None:
        """Does what this end must do while that many bytes come; returns when they are in."""

    async def close(self) -> None:
        """Ends what `open` began."""


class Path:
    """Two processes and a way between them, from `open` to `close`."""

    def __init__(self, module: str, options: Mapping[str, Any] | None = None) -> None:
        """`module` has a Near named NearEnd and a Far named FarEnd, each made from the options."""
        self._module, self._options = module, dict(options or {})
        self._ends: list[_End] = []

    def open(self, most_bytes: int) -> None:
        """Starts both ends. Raises Missing or PathBroke."""
        far = self._started("far")
        facts = far.ask("open", most_bytes=most_bytes)
        near = self._started("near")
        near.ask("open", facts=facts, most_bytes=most_bytes)

    def seconds(self, payload_bytes: int) -> float:
        """Carries once; the near end's seconds. Raises PathBroke."""
        far, near = self._ends
        far.begin("expect", payload_bytes=payload_bytes)
        spent_s = float(near.ask("carry", payload_bytes=payload_bytes))
        far.finish()
        return spent_s

    def close(self) -> None:
        """Ends both processes. Idempotent."""
        while self._ends:
            self._ends.pop().close()

    def _started(self, side: str) -> _End:
        end = _End(self._module, side, self._options)
        self._ends.append(end)
        return end


class _End:
    """One end's process as its parent holds it."""

    def __init__(self, module: str, side: str, options: Facts) -> None:
        self._name = f"{module} ({side})"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        command = [sys.executable, "-m", "benchmarks.end_process", module, side, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )

    def ask(self, call: str, **arguments: Any) -> Any:
        self.begin(call, **arguments)
        return self.finish()

    def begin(self, call: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"call": call, "arguments": arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError as error:
            raise self._broke("ended") from error

    def finish(self) -> Any:
        out = self._process.stdout
        assert out is not None
        readable, _, _ = select.select([out], [], [], DEADLINE_S)
        line = out.readline() if readable else b""
        if not line:
            raise self._broke("ended" if readable else f"gave no answer within {DEADLINE_S:g} s")
        answer = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "error" in answer:
            raise self._broke(answer["error"])
        return answer["result"]

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _broke(self, why: str) -> PathBroke:
        self._log.seek(0)
        tail = self._log.read().decode("utf-8", "replace")[-LOG_TAIL_CHARS:]
        return PathBroke(f"{self._name}: {why}\n{tail}")
