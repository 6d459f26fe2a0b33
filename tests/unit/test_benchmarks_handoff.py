"""The handoff benchmark carries bytes between real processes, and says what it could not measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import handoff, path_nixl
from benchmarks.ends import Facts, Missing, PathBroke
from benchmarks.ends import Path as Route
from benchmarks.report import Ratio, Report, Row
from benchmarks.rounds import interleaved, ratio_of

THIS = __name__
AIMED = {
    "shm_over_nixl": 1.0,
    "shm_over_memcpy": 0.35,
    "grpc_over_plain_grpc": 0.85,
    "nixl_over_bare_nixl": 0.9,
}


class FarEnd:
    """Stands in for a path: absent, broken or fine, as its options say."""

    def __init__(self, trouble: str) -> None:
        self._trouble = trouble

    async def open(self, most_bytes: int) -> Facts:
        if self._trouble == "absent":
            raise Missing("not on this machine")
        return {"most": most_bytes}

    async def expect(self, payload_bytes: int) -> None:
        if self._trouble == "broken":
            raise ValueError(f"no room for {payload_bytes}")

    async def close(self) -> None:
        """Nothing was opened."""


class NearEnd:
    """Takes a second for each byte, by its own account."""

    def __init__(self, trouble: str) -> None:
        """`trouble` is the far end's to have."""

    async def open(self, facts: Facts, most_bytes: int) -> None:
        assert facts == {"most": most_bytes}

    async def carry(self, payload_bytes: int) -> float:
        return float(payload_bytes)

    async def close(self) -> None:
        """Nothing was opened."""


@contextmanager
def route(trouble: str) -> Iterator[Route]:
    """A path whose ends are this file's."""
    path = Route(THIS, {"trouble": trouble})
    try:
        yield path
    finally:
        path.close()


def test_two_processes_are_opened_asked_and_closed() -> None:
    with route("none") as path:
        path.open(64)
        assert [path.seconds(7), path.seconds(8)] == [7.0, 8.0]


def test_a_path_that_this_machine_lacks_says_why() -> None:
    with route("absent") as path, pytest.raises(Missing, match="not on this machine"):
        path.open(64)


def test_an_end_that_fails_is_named_with_its_error() -> None:
    with route("broken") as path:
        path.open(64)
        with pytest.raises(PathBroke, match=r"\(far\): ValueError: no room for 7"):
            path.seconds(7)


def test_a_run_writes_rows_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "handoff.json"
    monkeypatch.setitem(handoff.AIMS, "tcp_over_memcpy", handoff.Aim(fast="tcp", rival="memcpy", target=0.3))
    only = ["memcpy", "tcp"]
    flags = ["--sizes", "1", "2", "--rounds", "1", "--only", *only, "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["handoff", *flags])
    handoff.main()
    result = json.loads(file.read_text())
    assert set(result) == {"rows", "ratios"}
    assert {row["name"] for row in result["rows"]} == {
        f"{name}_{size}_mib" for name in only for size in (1, 2)
    }
    assert all(row["value"] > 0 and row["unit"] == "GB/s" for row in result["rows"])
    found = {ratio["name"]: (ratio["target"], ratio["better"]) for ratio in result["ratios"]}
    assert found == {"tcp_over_memcpy": (0.3, "high")}


def test_every_named_ratio_has_its_target() -> None:
    assert AIMED.items() <= {name: aim.target for name, aim in handoff.AIMS.items()}.items()


def test_what_is_missing_is_printed_and_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = {"memcpy": handoff.PATHS["memcpy"], "kvpact_shm": handoff.Spec(module="absent")}
    report = Report(missing={"kvpact_shm": "not on this machine"})
    times = {"memcpy": [1.0]}
    value = handoff._ratio(handoff.AIMS["shm_over_memcpy"], times)
    report.rows.extend(Row(name=name, value=1.0 if name in times else None, unit="GB/s") for name in specs)
    report.ratios.append(Ratio(name="shm_over_memcpy", value=value, target=0.35, better="high"))
    report.show()
    shown = capsys.readouterr().out
    assert shown.count("MISSING") == 3
    assert "MISSING kvpact_shm: not on this machine" in shown
    report.write(tmp_path / "report.json")
    result = json.loads((tmp_path / "report.json").read_text())
    assert [row["value"] for row in result["rows"]] == [1.0, None]
    assert result["ratios"][0]["value"] is None
    assert not report.ratios[0].met


def test_a_rival_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_nixl, "PACKAGES", ("a_package_that_nobody_has",))
    with pytest.raises(Missing, match="make install-nixl"):
        path_nixl.make_agent("near")


def test_parts_of_a_paged_write_cover_each_byte_once_on_both_ends() -> None:
    for payload_bytes in (1, path_nixl.PART_BYTES, 3 * path_nixl.PART_BYTES, 5 * path_nixl.PART_BYTES + 7):
        parts = path_nixl.NearEnd(paged=True)._parts(payload_bytes)
        for side in (0, 1):
            ends = sorted((part[side], part[side] + part[2]) for part in parts)
            assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
            assert ends[-1][1] == payload_bytes
        assert parts[-1][1] + parts[-1][2] == payload_bytes


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def work(name: str) -> float:
        order.append(name)
        return float(len(order))

    given = interleaved({"a": lambda: work("a"), "b": lambda: work("b")}, 2)
    assert "".join(order) == "abbaab"
    assert given == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_ratio_compares_within_rounds() -> None:
    times = {"fast": [1.0, 10.0, 100.0], "slow": [2.0, 20.0, 200.0]}
    assert ratio_of(times, "slow", "fast") == 2.0
    assert ratio_of(times, "fast", "slow") == 0.5


def test_grpc_is_held_against_the_faster_of_two_plain_streams() -> None:
    times = {"kvpact_grpc": [4.0], "plain_grpc": [2.0], "plain_grpc_2_mib": [1.0]}
    assert handoff._ratio(handoff.AIMS["grpc_over_plain_grpc"], times) == 0.25
