"""Workers and coordinator as plain processes, without Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.clusters import STOP_DEADLINE_S, UpCluster, environment
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(180)


@contextmanager
def process(module: str, *flags: str, says: str) -> Iterator[tuple[str, int]]:
    """`python -m MODULE`: its first line that starts with `says`, and its pid. SIGTERM ends it cleanly."""
    command = [sys.executable, "-m", module, *flags]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    seen: list[str] = []
    try:
        assert running.stdout is not None
        for line in running.stdout:
            seen.append(line)
            if line.startswith(says):
                break
        assert seen[-1].startswith(says), f"{module}: {''.join(seen)}"
        yield seen[-1].strip(), running.pid
    finally:
        running.send_signal(signal.SIGTERM)
        rest, _ = running.communicate(timeout=STOP_DEADLINE_S)
    assert running.returncode == 0, f"{module} ended with {running.returncode}: {rest[-2000:]}"
    assert "Traceback" not in rest


def test_three_processes_serve_a_completion_without_ray(tiny_llama: Path) -> None:
    model = ("--model", str(tiny_llama))
    with ExitStack() as stack:
        line, pid = stack.enter_context(process("coordinator", *model, "--port", "0", says="http://"))
        url, endpoint = line.split(" workers ")
        for role in ("prefill", "decode"):
            flags = (*model, "--coordinator", endpoint)
            stack.enter_context(process(f"{role}_worker", *flags, says="serving "))
        cluster = UpCluster(url=url, pid=pid, first_line={})
        eventually(lambda: cluster.get("/ready")["ready"])
        prompt = prompt_of(20)
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 9} | {
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
    assert tuple(choice["token_ids"]) == golden(tiny_llama, prompt, 9).token_ids
