"""The TTFT benchmark reads its figures right; a scripted cluster stands in for three processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from benchmarks import ttft
from benchmarks.cluster import Answer, Cluster, _metric, _streamed_tokens
from benchmarks.report import Report

METRICS = """# TYPE kvpact_handoff_exposed_seconds histogram
kvpact_handoff_exposed_seconds_bucket{le="0.01"} 3.0
kvpact_handoff_exposed_seconds_count 4.0
kvpact_handoff_exposed_seconds_sum 0.25
by_worker{worker="a"} 1.5
by_worker{worker="b"} 2.0
"""
PLAN = ttft.Plan(rounds=2, long_rounds=1, output_tokens=3, idle_s=1.0)


@dataclass(slots=True)
class ScriptedCluster:
    """Answers as a cluster would whose handoffs take a tenth of a second, 20 ms of it exposed."""

    hands_over_from: int = ttft.SHORT
    prompts: list[list[int]] = field(default_factory=list)

    def ask(self, prompt: list[int], output_tokens: int) -> Answer:
        """See Cluster."""
        self.prompts.append(prompt)
        handed_over = len(prompt) >= self.hands_over_from
        first_s = len(prompt) / 1000 + (0.1 if handed_over else 0.0)
        return Answer(
            token_ids=tuple(range(output_tokens)),
            token_s=tuple(first_s + 0.05 * number for number in range(output_tokens)),
            exposed_s=0.02 if handed_over else None,
        )

    def cpu_share(self, seconds: float) -> dict[str, float]:
        """See Cluster."""
        return {"coordinator": 0.5, "prefill": 0.01, "decode": 0.03}


def measured(cluster: ScriptedCluster) -> Report:
    """A report of it."""
    return ttft.measure(cast(Cluster, cluster), PLAN)


def test_the_named_ratios_have_their_targets_and_values() -> None:
    ratios = {ratio.name: ratio for ratio in measured(ScriptedCluster()).ratios}
    assert {name: (ratio.target, ratio.better) for name, ratio in ratios.items()} == {
        "idle_cpu_prefill": (0.02, "low"),
        "idle_cpu_decode": (0.02, "low"),
        "ttft_512_over_local": (1.05, "low"),
        "itl_over_local": (1.05, "low"),
        "exposed_share_2048": (0.01, "low"),
    }
    values = {name: ratio.value for name, ratio in ratios.items()}
    assert values["ttft_512_over_local"] == pytest.approx(0.612 / 0.511)
    assert values["itl_over_local"] == pytest.approx(1.0)
    assert values["exposed_share_2048"] == pytest.approx(0.02 / 2.148)
    assert values["idle_cpu_decode"] == 0.03


def test_names_are_unique() -> None:
    report = measured(ScriptedCluster())
    names = [part.name for part in (*report.rows, *report.ratios)]
    assert len(names) == len(set(names))


def test_no_two_prompts_share_even_their_first_block() -> None:
    cluster = ScriptedCluster()
    measured(cluster)
    beginnings = [tuple(prompt[:16]) for prompt in cluster.prompts]
    assert len(set(beginnings)) == len(beginnings)


def test_a_prompt_that_went_the_other_way_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="512 tokens was computed by the decode worker itself"):
        measured(ScriptedCluster(hands_over_from=ttft.SHORT + 1))
    with pytest.raises(RuntimeError, match="511 tokens was computed by the prefill worker"):
        measured(ScriptedCluster(hands_over_from=1))


def test_metrics_are_summed_over_labels_and_zero_before_they_exist() -> None:
    assert _metric(METRICS, "kvpact_handoff_exposed_seconds_count") == 4.0
    assert _metric(METRICS, "by_worker") == 3.5
    assert _metric(METRICS, "by") == 0.0


def test_tokens_are_read_event_by_event_until_the_stream_fails() -> None:
    lines = [
        b'data: {"choices": [{"token_ids": [5, 6], "text": "a"}]}\n',
        b"\n",
        b'data: {"choices": [], "usage": {}}\n',
        b"data: [DONE]\n",
    ]
    assert list(_streamed_tokens(lines)) == [[5, 6]]
    with pytest.raises(RuntimeError, match="cut off"):
        list(_streamed_tokens([b'data: {"error": {"message": "cut off"}}\n']))


def test_times_between_tokens_are_counted_from_the_first() -> None:
    answer = Answer(token_ids=(1, 2, 3), token_s=(2.0, 2.5, 4.0), exposed_s=None)
    assert (answer.ttft_s, answer.itl_s) == (2.0, 1.0)
