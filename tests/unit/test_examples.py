"""Every number that the example prints is asserted, and it runs as a program."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from examples.rope_experiments import dynamic_table, experiments
from tests.repo.tree import ROOT

torch.set_num_threads(1)
PROGRAM = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SCRIPT = ROOT / "examples" / "rope_experiments.py"
EXPECTED = {
    "mixed_phase": {
        "score_with_the_old_key": 0.70711,
        "score_with_one_table": 0.5,
        "moved_by": 0.20711,
        "bound": 0.54120,
        "largest_share_of_the_bound_in_1000_draws": 1.0,
    },
    "local_repairs": {
        "score_with_the_rephased_key": 0.5,
        "score_with_key_and_query_moved_by_3": 0.5,
        "score_with_the_key_alone_moved_by_3": 0.0,
    },
    "two_layers": {
        "first_layer_off_by": 0.0,
        "second_layer_off_by": 0.04081,
        "history_itself_off_by": 0.11620,
    },
    "threshold": {
        "a_short_request_gets_the_first_table_again": 1.0,
        "cache_kept_first_layer_off_by": 0.00739,
        "cache_kept_second_layer_off_by": 0.05841,
        "cache_rephased_first_layer_off_by": 0.0,
        "cache_rephased_second_layer_off_by": 0.02171,
        "cache_rebuilt_first_layer_off_by": 0.0,
        "cache_rebuilt_second_layer_off_by": 0.0,
    },
}


def run(*arguments: str) -> str:
    """What the script prints, run from the repository's root as a reader would."""
    command = [sys.executable, "-c", PROGRAM, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_number_is_as_expected() -> None:
    found = experiments()
    assert {title: list(numbers) for title, numbers in found.items()} == {
        title: list(numbers) for title, numbers in EXPECTED.items()
    }
    for title, numbers in EXPECTED.items():
        assert found[title] == pytest.approx(numbers, abs=2e-5), title


def test_no_draw_passes_the_bound() -> None:
    assert experiments()["mixed_phase"]["largest_share_of_the_bound_in_1000_draws"] <= 1 + 1e-6


def test_the_table_changes_behind_the_threshold_and_not_before() -> None:
    assert dynamic_table(1) == dynamic_table(8)
    assert dynamic_table(9).inv_freq != dynamic_table(8).inv_freq


def test_the_program_prints_the_same_numbers_as_json() -> None:
    found = json.loads(run("--json"))
    for title, numbers in EXPECTED.items():
        assert found[title] == pytest.approx(numbers, abs=2e-5), title


def test_the_printed_table_holds_these_numbers_and_no_others() -> None:
    printed = [float(number) for number in re.findall(r"(-?\d+\.\d{5})$", run(), re.MULTILINE)]
    expected = [value for numbers in EXPECTED.values() for value in numbers.values()]
    assert printed == pytest.approx(expected, abs=2.1e-5)
