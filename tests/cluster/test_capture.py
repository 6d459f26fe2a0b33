"""A decode worker that captures leaves files that replay as they went; a changed byte is refused."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.handoff.capture_file import read_capture
from tests.cluster.clusters import UpCluster
from tests.cluster.test_standalone import process
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(180)


def served(model: Path, folder: Path, prompt: tuple[int, ...]) -> None:
    """Workers and coordinator as processes, the decode worker with --capture, and one completion."""
    flags = ("--model", str(model))
    with ExitStack() as stack:
        line, pid = stack.enter_context(process("coordinator", *flags, "--port", "0", says="http://"))
        url, endpoint = line.split(" workers ")
        for role, more in (("prefill", ()), ("decode", ("--capture", str(folder)))):
            registered = (*flags, "--coordinator", endpoint, *more)
            stack.enter_context(process(f"{role}_worker", *registered, says="serving "))
        cluster = UpCluster(url=url, pid=pid, first_line={})
        eventually(lambda: cluster.get("/ready")["ready"])
        body = {"model": model.name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60):
            pass


def test_a_served_prompt_replays_as_it_went_and_a_changed_byte_is_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(20)
    served(tiny_llama, tmp_path / "captures", prompt)
    files = sorted((tmp_path / "captures" / "decode-0").iterdir())
    assert all(file.suffix == ".kvpact" for file in files)
    captures = [read_capture(file) for file in files]
    terms = [capture.reserved.terms for capture in captures if capture.reserved is not None]
    assert [each.canary for each in terms] == [True, False]
    assert terms[1].token_ids == prompt
    command = ["handoff", "replay", "--json", "--model", str(tiny_llama)]
    for file in files:
        result = CliRunner().invoke(app, [*command, "--tokens", "4", str(file)])
        assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert tuple(facts["token_ids"]) == golden(tiny_llama, prompt, 4).token_ids
    data = files[1].read_bytes()
    (tmp_path / "changed.kvpact").write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    result = CliRunner().invoke(app, [*command, str(tmp_path / "changed.kvpact")])
    assert (result.exit_code, json.loads(result.stdout)["error"]["reason"]) == (3, "UNREADABLE_SOURCE")
