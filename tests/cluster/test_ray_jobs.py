"""Batches as Ray jobs on several nodes: killed half-way, gone on with, and a node lost on the way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.ray_nodes import RAY, RayNodes, ray_nodes
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(400)
KVPACT = (sys.executable, "-c", "from kvpact.cli.main import main; main()")
NODES = {
    f"{role}-node-{index}": {"kvpact-role": role} for role in ("prefill", "decode") for index in range(2)
}
LINES, BAD_LINE, LONG_LINES = 40, 7, (11, 23)
OUTPUT_TOKENS = 24
JOB_S = 240.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ray_nodes(tmp_path_factory.mktemp("ray"), NODES) as running:
        yield running


def prompt_length(number: int) -> int:
    return 5 + 3 * number


def write_batch(path: Path, *, tokens: int = OUTPUT_TOKENS, too_long: int = 5000) -> None:
    """Forty lines: one that isn't JSON, two whose prompts of `too_long` tokens the model can't take."""
    lines = []
    for number in range(1, LINES + 1):
        length = too_long if number in LONG_LINES else prompt_length(number)
        body = {
            "prompt": list(prompt_of(length)),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append("{broken" if number == BAD_LINE else json.dumps(request))
    path.write_text("\n".join(lines) + "\n")


def write_config(path: Path, model: Path | str) -> None:
    """Roles on their own nodes, with caches that differ in form."""
    sides = {
        role: {"ray": {"labels": {"kvpact-role": role}}, "cache": cache}
        for role, cache in {
            "prefill": {"key_state": "raw", "block_size": 32},
            "decode": {"key_state": "rotated", "block_size": 16},
        }.items()
    }
    path.write_text(yaml.safe_dump({"model": str(model), "prefill_workers": 2, "decode_workers": 2, **sides}))


def records(path: Path) -> dict[int, dict[str, Any]]:
    """Whole records so far, by line; a line that is answered twice fails the test."""
    found: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if text.endswith("\n"):
            record = json.loads(text)
            assert record["line"] not in found, f"line {record['line']} was done twice"
            found[record["line"]] = record
    return found


def test_the_doctor_asks_every_node_and_finds_equal_ones_fit(nodes: RayNodes, tiny_llama: Path) -> None:
    command = [*KVPACT, "doctor", "--address", nodes.address, "--model", str(tiny_llama), "--json"]
    done = subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [each for each in told["findings"] if each["level"] == "error"] == []
    assert len(told["nodes"]) == len(nodes.alive()) == 1 + len(NODES)
    assert "Token authentication" not in done.stderr
    assert len({each["model_digest"] for each in told["nodes"]} - {None}) == 1


def test_a_batch_that_is_killed_goes_on_and_survives_the_loss_of_a_node(
    nodes: RayNodes, tiny_llama: Path, tmp_path: Path
) -> None:
    source, output, config = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "kvpact.yaml"
    write_batch(source)
    write_config(config, tiny_llama)
    command = [*KVPACT, "batch", str(source), str(output), "--address", "auto", "--config", str(config)]

    first = nodes.job(*command, "--at-once", "2")
    eventually(lambda: len(records(output)) >= 8, JOB_S)
    stop_job(nodes, first)
    before = records(output)
    assert 8 <= len(before) < LINES

    second = nodes.job(*command, "--at-once", "2", "--json")
    eventually(lambda: len(records(output)) >= len(before) + 6, JOB_S)
    nodes.kill("decode-node-1")
    log, _ = second.communicate(timeout=JOB_S)

    after = records(output)
    assert sorted(after) == list(range(1, LINES + 1)), log[-4000:]
    assert {line: after[line] for line in before} == before
    check_records(after, tiny_llama)
    assert second.returncode != 0, "a job with failed lines says so"
    assert '"failed": 3' in log


def check_records(found: dict[int, dict[str, Any]], model: Path, tokens: int = OUTPUT_TOKENS) -> None:
    """Good lines have transformers' tokens, the others an error record."""
    for line, record in found.items():
        if line == BAD_LINE:
            assert record["error"]["code"] == "invalid_line"
        elif line in LONG_LINES:
            assert record["response"]["status_code"] == 400
            assert record["response"]["body"]["error"]["code"] == "context_length_exceeded"
        else:
            (choice,) = record["response"]["body"]["choices"]
            expected = golden(model, prompt_of(prompt_length(line)), tokens).token_ids
            assert tuple(choice["token_ids"]) == expected, f"line {line}"


def stop_job(nodes: RayNodes, job: Any) -> None:
    """`ray job stop` of the job that this submission told."""
    name = None
    while name is None:
        line = job.stdout.readline()
        assert line, "the submission ended without telling its job"
        told = re.search(r"raysubmit_\w+", line)
        name = told and told.group()
    stopped = subprocess.run(
        [RAY, "job", "stop", "--address", nodes.dashboard, name],
        env=nodes.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    job.communicate(timeout=60)
