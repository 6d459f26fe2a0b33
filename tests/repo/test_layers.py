"""Import contracts hold, and no module stands outside them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.repo.tree import ROOT, package_files, settings


def lint_imports() -> Path:
    """The program beside the running interpreter."""
    return Path(sys.executable).parent / "lint-imports"


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [lint_imports(), "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_stands_in_one_layer() -> None:
    contracts = settings()["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    named = [name for layer in layers for name in re.split(r"[|:\s]+", layer)]
    found = {
        ".".join(file.with_suffix("").parts[:2]) for file in package_files() if file.parts[0] == "kvpact"
    }
    found = (found | {"kvpact.v1"}) - {"kvpact.__init__"}
    found |= {file.parts[0] for file in package_files() if file.parts[0] != "kvpact"}
    assert sorted(found) == sorted(named)


def test_every_package_is_in_the_wheel_list() -> None:
    listed = settings()["tool"]["setuptools"]["packages"]
    found = {".".join(file.parent.parts) for file in package_files()} | {"kvpact.v1"}
    assert sorted(found) == sorted(listed)
