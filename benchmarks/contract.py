"""How long a contract takes: to compare, to look up, and to convert by, beside a plain copy of the bytes.

python -m benchmarks.contract [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.contract_cases import CASES, Case, Landing, known_pair, sides_of
from benchmarks.report import Ratio, Report, Row, seconds_of, seconds_side_by_side
from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Contract

LAYERS = 64
COMPARE_TARGET_S = 2e-3
KNOWN_PAIR_TARGET_S = 50e-6


def main() -> None:
    """Measures, prints, and writes a file where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and fewer layers")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    report = measure(quick=arguments.quick)
    report.show()
    if arguments.json is not None:
        report.write(arguments.json)


def measure(*, quick: bool) -> Report:
    """One run, every conversion on one thread, as the copy beside it."""
    torch.set_num_threads(1)
    report = Report()
    _measure_verdicts(report, repeats=20 if quick else 200)
    tokens, layers, repeats = (4096, 4, 5) if quick else (4096, 30, 9)
    for case in CASES:
        _measure_conversion(report, case, Landing(case, tokens=tokens, layers=layers), repeats)
    return report


def _measure_verdicts(report: Report, *, repeats: int) -> None:
    writer, reader = sides_of(CASES[0], layers=LAYERS)
    pairs = {"": (writer, reader), "_of_64_groups": (_one_layer_a_group(writer), _one_layer_a_group(reader))}
    for suffix, (ours, theirs) in pairs.items():
        reach = ours.model.context_tokens

        def full(ours: Contract = ours, theirs: Contract = theirs, reach: int = reach) -> object:
            return compare(ours, theirs, Policy(), reach)

        def fresh(ours: Contract = ours, theirs: Contract = theirs, reach: int = reach) -> object:
            return compare(replace(ours), replace(theirs), Policy(), reach)

        _report_time(report, f"compare_64_layers{suffix}", full, repeats, COMPARE_TARGET_S)
        _report_time(report, f"compare_and_digest_64_layers{suffix}", fresh, repeats, COMPARE_TARGET_S)
    _report_time(report, "known_pair", known_pair(writer, reader), 10 * repeats, KNOWN_PAIR_TARGET_S)


def _report_time(
    report: Report, name: str, work: Callable[[], object], repeats: int, target_s: float
) -> None:
    spent_s = seconds_of(work, repeats=repeats)
    report.rows.append(Row(name=name, value=spent_s * 1e6, unit="us"))
    report.ratios.append(
        Ratio(name=f"{name}_over_target", value=spent_s / target_s, target=1.0, better="low")
    )


def _measure_conversion(report: Report, case: Case, landing: Landing, repeats: int) -> None:
    copy_s, fast_s, reference_s = seconds_side_by_side(
        [landing.copy, landing.convert, landing.convert_by_reference], repeats=repeats
    )
    for name, spent_s in (("", fast_s), ("_reference", reference_s)):
        rate = landing.payload_bytes / spent_s / 1e9
        report.rows.append(Row(name=f"convert_{case.name}{name}", value=rate, unit="GB/s"))
    report.rows.append(
        Row(name=f"copy_beside_{case.name}", value=landing.payload_bytes / copy_s / 1e9, unit="GB/s")
    )
    report.ratios.append(
        Ratio(name=f"convert_{case.name}_over_copy", value=copy_s / fast_s, target=case.target, better="high")
    )


def _one_layer_a_group(contract: Contract) -> Contract:
    groups = tuple(
        replace(group, layers=(layer,)) for group in contract.layer_groups for layer in group.layers
    )
    return replace(contract, layer_groups=groups)


if __name__ == "__main__":
    main()
