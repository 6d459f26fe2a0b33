"""The wheel holds the packages and nothing else, and compares contracts where no torch is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.repo.tree import PACKAGES, ROOT, settings

pytestmark = pytest.mark.timeout(300)

NEEDED_TO_COMPARE = ("numpy", "pydantic", "pydantic-settings", "pyyaml", "typer", "rich")
"""All that `kvpact contract check` needs of the dependencies; with one less it doesn't start."""

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program outside the repository; output captured, exit code left to the caller."""
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that no build output is left in the repository."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "repo", tree / "tests" / "repo")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def torch_free(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an environment that holds the wheel and what comparison needs."""
    folder = tmp_path_factory.mktemp("torch_free")
    venv.create(folder, with_pip=True, symlinks=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    for what in (("--constraint", ROOT / "constraints.txt", *NEEDED_TO_COMPARE), ("--no-deps", wheel)):
        done = run(*pip, *what, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """A config.json in a folder of its own."""
    (folder / name).mkdir()
    path = folder / name / "config.json"
    path.write_text(json.dumps(TINY_CONFIG | changes), encoding="utf-8")
    return path


def test_the_wheel_holds_the_listed_packages_and_the_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.rsplit("/", 1)[0].replace("/", ".") for name in names if ".dist-info/" not in name}
    assert sorted(folders) == sorted(settings()["tool"]["setuptools"]["packages"])
    assert {name.rsplit(".", 1)[1] for name in names if ".dist-info/" not in name} == {"py", "pyi"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_package_file_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py*"))
    sources = (path for path in found if "__pycache__" not in path.parts)
    assert [str(path.relative_to(ROOT)) for path in sources if str(path.relative_to(ROOT)) not in names] == []


def test_contract_check_works_where_torch_is_not_installed(torch_free: Path, tmp_path: Path) -> None:
    writer, same = write_config(tmp_path, "writer"), write_config(tmp_path, "same")
    other = write_config(tmp_path, "other", rope_theta=10000.0)
    no_torch = run(torch_free / "bin" / "python", "-c", "import torch", cwd=tmp_path)
    assert "ModuleNotFoundError" in no_torch.stderr
    check = (torch_free / "bin" / "kvpact", "contract", "check")
    accepted = run(*check, writer, same, cwd=tmp_path)
    assert (accepted.returncode, "accept" in accepted.stdout) == (0, True), accepted.stdout + accepted.stderr
    refused = run(*check, writer, other, "--json", cwd=tmp_path)
    assert refused.returncode == 20, refused.stdout + refused.stderr
    verdict = json.loads(refused.stdout)
    assert verdict["verdict"] == "reject"
    assert [difference["field"] for difference in verdict["differences"]] == ["inv_freq"]
