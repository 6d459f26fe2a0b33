"""The commands of docs/operations.md do what it says, where a Ray on this machine suffices."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.clusters import environment
from tests.cluster.ray_nodes import free_port
from tests.k8s.test_commands import unknown_words
from tests.k8s.test_monitoring import exposed
from tests.repo.tree import ROOT

pytestmark = pytest.mark.timeout(300)

TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([^`]+)`(?:,? being)?[:.]?\n*\Z")
"""How the text before a block names the file that it is."""
NEEDS_KUBERNETES = ("kubectl -n kvpact port-forward service/kvpact-coordinator 8000 &",)
"""First lines of blocks that aren't run: they talk to a Kubernetes cluster."""
INLINE = re.compile(r"`kvpact ([a-z][^`]*)`")
METRIC = re.compile(r"`((?:kvpact_|vllm:)[a-z_]+)`")


def files() -> dict[str, str]:
    """Name to content of each file that the text shows."""
    found = {}
    for block in BLOCK.finditer(TEXT):
        named = NAMED.search(TEXT[: block.start()])
        if block[1] != "sh" and named is not None:
            found[named[1]] = block[2]
    return found


def scripts() -> list[str]:
    """Blocks of commands, in order."""
    return [block[2] for block in BLOCK.finditer(TEXT) if block[1] == "sh"]


def unrunnable(script: str) -> bool:
    return script.splitlines()[0] in NEEDS_KUBERNETES


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """bash that stops at the first failure; what it started ends with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment() | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_the_commands_run_in_their_order(tiny_llama: Path, tmp_path: Path) -> None:
    changed = {"smollm2": str(tiny_llama), "8000": str(free_port()), "7100": str(free_port())}

    def here(text: str) -> str:
        for known, found in changed.items():
            text = text.replace(known, found)
        return text

    shown = files()
    assert set(shown) == {"kvpact.yaml", "new.yaml", "wrong.yaml", "in.jsonl"}
    for name, content in shown.items():
        (tmp_path / name).write_text(here(content))
    script = "\n".join(here(each) for each in scripts() if not unrunnable(each))
    port = f"export KVPACT_API__PORT={changed['8000']} COLUMNS=200\n"
    url = f"--url http://127.0.0.1:{changed['8000']}"
    script = re.sub(r"^(kvpact (?:status|drain|scale)\b[^\n]*)", rf"\1 {url}", script, flags=re.MULTILINE)
    done = run(port + script, tmp_path)
    told = done.stdout + (tmp_path / "up.log").read_text()
    assert done.returncode == 0, told[-6000:]
    for part in ("inv_freq", '"verdict": "convert"', "decode-1 is idle", "1 decode workers serve"):
        assert part in done.stdout
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert "Traceback" not in told + (tmp_path / "new.log").read_text()


def test_every_block_is_run_or_listed_with_what_it_needs() -> None:
    left = [script for script in scripts() if unrunnable(script)]
    assert len(left) == len(NEEDS_KUBERNETES)
    assert all("kubectl" in script for script in left)
    assert [script for script in scripts() if "kubectl" in script] == left


def test_a_command_that_fails_stops_the_script(tmp_path: Path) -> None:
    assert run("true\n", tmp_path).returncode == 0
    done = run("kvpact drain nobody --url http://127.0.0.1:9\necho went on\n", tmp_path)
    assert done.returncode == 1
    assert "\nwent on" not in done.stdout


def test_commands_and_metrics_in_the_text_exist() -> None:
    known = {name.removesuffix("_created") for name in exposed()}
    assert [name for name in METRIC.findall(TEXT) if name not in known] == []
    commands = [command.split() for command in INLINE.findall(TEXT)]
    assert len(commands) > 10
    assert {" ".join(words): unknown for words in commands if (unknown := unknown_words(words))} == {}
