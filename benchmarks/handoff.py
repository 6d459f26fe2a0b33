"""How fast a cache gets from one process to another: kvpact's transports, checks on, beside bare paths.

python -m benchmarks.handoff [--quick] [--json FILE] [--sizes MIB ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FilePath
from statistics import median
from typing import Any

from benchmarks.ends import Missing, Path
from benchmarks.report import Ratio, Report, Row
from benchmarks.rounds import Times, interleaved, ratio_of

MIB = 1 << 20
SIZES_MIB = (8, 32, 64, 128, 256, 512)
QUICK_SIZES_MIB = (8, 256)
ROUNDS, QUICK_ROUNDS = 9, 3
OPENED_AT_A_TIME = 2
RATIO_MIB = 256
"""The size that ratios are taken at; the largest of the run where it isn't among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A path between two processes: its module in this package, and what makes its ends."""

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A ratio of speeds, and what to reach."""

    fast: str
    rival: str
    target: float


PATHS = {
    "memcpy": Spec(module="path_memory"),
    "tcp": Spec(module="path_tcp"),
    "nixl_write": Spec(module="path_nixl", options={"paged": False}),
    "nixl_write_paged": Spec(module="path_nixl", options={"paged": True}),
    "plain_grpc": Spec(module="path_grpc", options={"message_bytes": MIB}),
    "plain_grpc_2_mib": Spec(module="path_grpc", options={"message_bytes": 2 * MIB}),
    "kvpact_shm": Spec(module="path_kvpact", options={"transport": "shm"}),
    "kvpact_nixl": Spec(module="path_kvpact", options={"transport": "nixl"}),
    "kvpact_grpc": Spec(module="path_kvpact", options={"transport": "grpc"}),
}
PLAIN_GRPC = ("plain_grpc", "plain_grpc_2_mib")
"""The same with two sizes of message; kvpact is held against whichever is faster here."""
AIMS = {
    "shm_over_nixl": Aim(fast="kvpact_shm", rival="nixl_write", target=1.0),
    "shm_over_nixl_paged": Aim(fast="kvpact_shm", rival="nixl_write_paged", target=1.0),
    "shm_over_memcpy": Aim(fast="kvpact_shm", rival="memcpy", target=0.35),
    "grpc_over_plain_grpc": Aim(fast="kvpact_grpc", rival="plain_grpc", target=0.85),
    "nixl_over_bare_nixl": Aim(fast="kvpact_nixl", rival="nixl_write", target=0.9),
    "nixl_over_bare_nixl_paged": Aim(fast="kvpact_nixl", rival="nixl_write_paged", target=0.9),
}


def main() -> None:
    """Measures, prints, and writes a file where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes and fewer rounds")
    parser.add_argument("--json", type=FilePath, help="file for the result")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB", help="payloads in MiB")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds that count")
    parser.add_argument("--only", nargs="+", choices=PATHS, metavar="PATH", help=f"of {', '.join(PATHS)}")
    arguments = parser.parse_args()
    sizes_mib = arguments.sizes or (QUICK_SIZES_MIB if arguments.quick else SIZES_MIB)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    specs = {name: PATHS[name] for name in arguments.only or PATHS}
    report = measure(specs, sizes_mib=sorted(sizes_mib), rounds=rounds)
    report.show()
    if arguments.json is not None:
        report.write(arguments.json)


def measure(specs: Mapping[str, Spec], *, sizes_mib: list[int], rounds: int) -> Report:
    """All paths in one run, size by size, in interleaved rounds."""
    report = Report()
    with _opened(specs, max(sizes_mib) * MIB, report) as paths:
        times = {size: _timed(paths, size * MIB, rounds) for size in sizes_mib}
    for size in sizes_mib:
        for name in specs:
            spent = times[size].get(name)
            rate = None if spent is None else size * MIB / median(spent) / 1e9
            report.rows.append(Row(name=f"{name}_{size}_mib", value=rate, unit="GB/s"))
    taken_at = RATIO_MIB if RATIO_MIB in sizes_mib else max(sizes_mib)
    for name, aim in AIMS.items():
        if {aim.fast, aim.rival} <= specs.keys():
            value = _ratio(aim, times[taken_at])
            report.ratios.append(Ratio(name=name, value=value, target=aim.target, better="high"))
    return report


def _timed(paths: Mapping[str, Path], payload_bytes: int, rounds: int) -> Times:
    return interleaved({name: partial(path.seconds, payload_bytes) for name, path in paths.items()}, rounds)


def _ratio(aim: Aim, times: Times) -> float | None:
    """How many times faster than the rival; of several rivals of one kind, than the fastest."""
    rivals = [name for name in (PLAIN_GRPC if aim.rival in PLAIN_GRPC else (aim.rival,)) if name in times]
    if aim.fast not in times or not rivals:
        return None
    return min(ratio_of(times, rival, aim.fast) for rival in rivals)


@contextmanager
def _opened(specs: Mapping[str, Spec], most_bytes: int, report: Report) -> Iterator[dict[str, Path]]:
    """Both ends of every path that this machine has; the others go to the report."""
    paths = {name: Path(f"benchmarks.{spec.module}", spec.options) for name, spec in specs.items()}

    def opened(name: str) -> bool:
        try:
            paths[name].open(most_bytes)
        except Missing as error:
            report.missing[name] = str(error)
            return False
        return True

    try:
        with ThreadPoolExecutor(OPENED_AT_A_TIME) as threads:
            there = dict(zip(paths, threads.map(opened, paths), strict=True))
        yield {name: path for name, path in paths.items() if there[name]}
    finally:
        with ThreadPoolExecutor(len(paths)) as threads:
            list(threads.map(Path.close, paths.values()))


if __name__ == "__main__":
    main()
