"""A batch as a Ray job on the real checkpoint, two workers of each role: lines as transformers has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.engine.weights import resolve_model
from tests.cluster.ray_nodes import ray_nodes
from tests.cluster.test_ray_jobs import (
    KVPACT,
    LINES,
    NODES,
    check_records,
    records,
    write_batch,
    write_config,
)

OUTPUT_TOKENS, TOO_LONG, JOB_S = 16, 9000, 1200.0


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_forty_lines_as_a_ray_job_equal_transformers(tmp_path: Path) -> None:
    source, output, config = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "kvpact.yaml"
    write_batch(source, tokens=OUTPUT_TOKENS, too_long=TOO_LONG)
    write_config(config, "smollm2")
    command = [*KVPACT, "batch", str(source), str(output), "--address", "auto", "--config", str(config)]
    with ray_nodes(tmp_path, NODES) as nodes:
        log, _ = nodes.job(*command, "--json").communicate(timeout=JOB_S)
    assert '"failed": 3' in log, log[-4000:]
    found = records(output)
    assert sorted(found) == list(range(1, LINES + 1))
    check_records(found, resolve_model("smollm2"), OUTPUT_TOKENS)
