"""`kvpact up --local-prefill-max-tokens`: short prompts stay away from prefill workers, answers are equal."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.clusters import UpCluster, up
from tests.cluster.conftest import MIXED
from tests.cluster.test_serving import all_blocks_free, complete
from tests.fakes import prompt_of
from tests.references import golden

pytestmark = pytest.mark.timeout(180)
LIMIT = 25
LENGTHS = (1, 16, 24, LIMIT, LIMIT + 1, 97)


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    """A pair that converts, of which the decode side computes prompts of up to LIMIT tokens itself."""
    log = tmp_path_factory.mktemp("logs") / "local.log"
    with up(tiny_llama, *MIXED, "--local-prefill-max-tokens", str(LIMIT), log=log) as running:
        yield running


def work(cluster: UpCluster) -> tuple[int, int, int]:
    """Prompt tokens that prefill and decode computed, and handoffs that decode took."""
    workers = cluster.workers()
    prefill, decode = workers["prefill-0"]["counters"], workers["decode-0"]["counters"]
    return (
        prefill["computed_prompt_tokens"],
        decode["computed_prompt_tokens"],
        decode["committed_handoffs"],
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_only_longer_prompts_reach_the_prefill_worker(
    cluster: UpCluster, tiny_llama: Path, length: int
) -> None:
    before = work(cluster)
    prompt = prompt_of(length, seed=length)
    assert tuple(complete(cluster, prompt, 16)) == golden(tiny_llama, prompt, 16).token_ids
    added = tuple(now - then for now, then in zip(work(cluster), before, strict=True))
    assert added == ((0, length, 0) if length <= LIMIT else (length, 0, 1))
    assert all_blocks_free(cluster)


def test_the_metrics_count_local_prompts_apart(cluster: UpCluster) -> None:
    def counted() -> tuple[float, float]:
        with urllib.request.urlopen(cluster.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        value = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
        return value["kvpact_local_prefills_total"], value.get(
            'kvpact_handoffs_total{result="committed"}', 0.0
        )

    before = counted()
    for length in (LIMIT, LIMIT + 1):
        complete(cluster, prompt_of(length, seed=7), 4)
    assert counted() == (before[0] + 1, before[1] + 1)
