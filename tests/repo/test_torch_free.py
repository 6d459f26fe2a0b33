"""Comparison, handoff, coordinator and the command line start without torch, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tests.repo.tree import ROOT, module_name, package_files

HEAVY = ("torch", "ray", "transformers")
TORCH_IN_CONTRACT = (
    "kvpact/contract/rotation.py",
    "kvpact/contract/convert*.py",
    "kvpact/contract/witness.py",
)
RAY_IN_COORDINATOR = ("*/actor.py", "*/supervisor.py", "*/__main__.py")
PROBE = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
    found = [heavy for heavy in sys.argv[1].split(",") if heavy in sys.modules]
    if found:
        sys.exit(f"importing {name} brought {', '.join(found)}")
"""


def modules_below(folder: str, but: tuple[str, ...] = ()) -> list[str]:
    """Names of the modules in a folder and its subfolders, less the files that fit a pattern."""
    files = (file for file in package_files() if str(file).startswith(f"{folder}/"))
    return [module_name(file) for file in files if not any(fnmatch(str(file), pattern) for pattern in but)]


GROUPS = {
    "foundations": ["kvpact.types", "kvpact.errors", "kvpact.clock", "kvpact.config", "kvpact.metrics"],
    "contract": modules_below("kvpact/contract", but=TORCH_IN_CONTRACT),
    "handoff": modules_below("kvpact/handoff"),
    "serving": modules_below("kvpact/serving", but=("kvpact/serving/engine_factory.py",)),
    "coordinator": modules_below("coordinator", but=RAY_IN_COORDINATOR),
    "cli": ["kvpact.cli.main"],
}


def probe(modules: list[str], heavy: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Imports modules one by one in a fresh interpreter; fails at the first that brings a heavy one."""
    command = [sys.executable, "-c", PROBE, ",".join(heavy), *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("group", GROUPS)
def test_importing_brings_neither_torch_nor_ray_nor_transformers(group: str) -> None:
    done = probe(GROUPS[group], HEAVY)
    assert done.returncode == 0, done.stderr


def test_the_coordinator_under_ray_brings_no_torch() -> None:
    done = probe(["coordinator.supervisor"], ("torch", "transformers"))
    assert done.returncode == 0, done.stderr


def test_the_probe_sees_torch_where_it_is() -> None:
    done = probe(["kvpact.contract.rotation"], HEAVY)
    assert done.returncode == 1
    assert "kvpact.contract.rotation brought torch" in done.stderr
