"""The contract benchmark runs, and writes the form that everybody reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import contract
from benchmarks.report import Ratio

NAMED = {
    "convert_raw_to_rotated_relayout_float32_over_copy": 0.4,
    "convert_raw_to_rotated_relayout_bfloat16_over_copy": 0.35,
}


def test_a_quick_run_writes_rows_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "contract.json"
    monkeypatch.setattr("sys.argv", ["contract", "--quick", "--json", str(file)])
    contract.main()
    result = json.loads(file.read_text())
    assert set(result) == {"rows", "ratios"}
    assert all(set(row) == {"name", "value", "unit"} for row in result["rows"])
    assert all(set(ratio) == {"name", "value", "target", "better"} for ratio in result["ratios"])
    assert all(part["value"] > 0 for part in result["rows"] + result["ratios"])
    names = [part["name"] for part in result["rows"] + result["ratios"]]
    assert len(names) == len(set(names))
    targets = {ratio["name"]: (ratio["target"], ratio["better"]) for ratio in result["ratios"]}
    assert {name: targets[name] for name in NAMED} == {name: (aim, "high") for name, aim in NAMED.items()}
    assert {"compare_64_layers", "known_pair"} <= {row["name"] for row in result["rows"]}


@pytest.mark.parametrize(("better", "value", "met"), [("low", 0.9, True), ("high", 0.9, False)])
def test_a_ratio_knows_its_good_side(better: str, value: float, met: bool) -> None:
    assert Ratio(name="r", value=value, target=1.0, better=better).met is met  # type: ignore[arg-type]
