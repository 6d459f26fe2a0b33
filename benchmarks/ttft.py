"""What disaggregation costs a request: time to first token, inter-token latency, exposed handoff, idle CPU.

python -m benchmarks.ttft [--quick] [--json FILE] [--threads N]

One cluster: prompts of 511 tokens are computed by the decode worker itself, those of 512 by the prefill
worker, on the same engine with as many threads. No two prompts are alike, so that no prefix is reused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.cluster import Answer, Cluster, started
from benchmarks.report import Ratio, Report, Row
from benchmarks.rounds import interleaved, ratio_of
from kvpact.engine.weights import resolve_model

MODEL = "smollm2"
SHORT, LONG = 512, 2048
LOCAL = SHORT - 1
VOCABULARY = (1000, 49000)
"""Ordinary tokens of the model, [first, last)."""
IDLE_TARGET = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    long_rounds: int
    output_tokens: int
    idle_s: float


FULL = Plan(rounds=11, long_rounds=5, output_tokens=64, idle_s=10.0)
QUICK = Plan(rounds=3, long_rounds=1, output_tokens=16, idle_s=3.0)


def main() -> None:
    """Measures, prints, and writes a file where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads a worker, default 1")
    parser.add_argument("--transport", default="auto", help="handoff.transport, default auto")
    arguments = parser.parse_args()
    settings = {
        "local_prefill_max_tokens": LOCAL,
        "engine": {"threads": arguments.threads},
        "handoff": {"transport": arguments.transport},
    }
    with started(resolve_model(MODEL), settings) as cluster:
        report = measure(cluster, QUICK if arguments.quick else FULL)
    report.show()
    if arguments.json is not None:
        report.write(arguments.json)


def measure(cluster: Cluster, plan: Plan) -> Report:
    """All of it on one running cluster."""
    report = Report()
    prompts = distinct_prompts()
    _measure_idle(report, cluster, plan.idle_s)
    _measure_short(report, cluster, plan, prompts)
    _measure_long(report, cluster, plan, prompts)
    return report


def distinct_prompts() -> Iterator[np.random.Generator]:
    """Sources of token ids, a new one for each prompt."""
    number = 0
    while True:
        yield np.random.default_rng(number)
        number += 1


def _ask(cluster: Cluster, sources: Iterator[np.random.Generator], tokens: int, outputs: int) -> Answer:
    answer = cluster.ask(next(sources).integers(*VOCABULARY, size=tokens).tolist(), outputs)
    if (answer.exposed_s is None) is not (tokens <= LOCAL):
        where = "by the decode worker itself" if answer.exposed_s is None else "by the prefill worker"
        raise RuntimeError(f"a prompt of {tokens} tokens was computed {where}")
    return answer


def _measure_idle(report: Report, cluster: Cluster, seconds: float) -> None:
    for name, share in cluster.cpu_share(seconds).items():
        report.rows.append(Row(name=f"idle_{name}", value=share, unit="cores"))
        if name != "coordinator":
            report.ratios.append(
                Ratio(name=f"idle_cpu_{name}", value=share, target=IDLE_TARGET, better="low")
            )


def _measure_short(
    report: Report, cluster: Cluster, plan: Plan, prompts: Iterator[np.random.Generator]
) -> None:
    answers = interleaved(
        {
            "disaggregated": lambda: _ask(cluster, prompts, SHORT, plan.output_tokens),
            "local": lambda: _ask(cluster, prompts, LOCAL, plan.output_tokens),
        },
        plan.rounds,
    )
    ttft = {name: [answer.ttft_s for answer in own] for name, own in answers.items()}
    itl = {name: [answer.itl_s for answer in own] for name, own in answers.items()}
    for what, times in ((f"ttft_{SHORT}", ttft), ("itl", itl)):
        for name, own in times.items():
            report.rows.append(Row(name=f"{what}_{name}", value=median(own) * 1e3, unit="ms"))
        ratio = ratio_of(times, "disaggregated", "local")
        report.ratios.append(Ratio(name=f"{what}_over_local", value=ratio, target=1.05, better="low"))
    exposed = median(answer.exposed_s or 0.0 for answer in answers["disaggregated"])
    report.rows.append(Row(name=f"exposed_{SHORT}", value=exposed * 1e3, unit="ms"))


def _measure_long(
    report: Report, cluster: Cluster, plan: Plan, prompts: Iterator[np.random.Generator]
) -> None:
    answers = [_ask(cluster, prompts, LONG, 2) for _ in range(plan.long_rounds)]
    exposed = median(answer.exposed_s or 0.0 for answer in answers)
    share = median((answer.exposed_s or 0.0) / answer.ttft_s for answer in answers)
    report.rows.append(Row(name=f"ttft_{LONG}", value=median(a.ttft_s for a in answers) * 1e3, unit="ms"))
    report.rows.append(Row(name=f"exposed_{LONG}", value=exposed * 1e3, unit="ms"))
    report.ratios.append(Ratio(name=f"exposed_share_{LONG}", value=share, target=0.01, better="low"))


if __name__ == "__main__":
    main()
