"""The Dockerfile: linted, pinned, run by a user without rights, and without a model or a cache in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.rules import VERSION
from tests.repo.tree import PACKAGES, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def lint(text: str) -> subprocess.CompletedProcess[str]:
    """hadolint's word on a Dockerfile."""
    program = Path(sys.executable).parent / "hadolint"
    return subprocess.run(
        [str(program), "--no-color", "-"], input=text, capture_output=True, text=True, check=False
    )


def stages() -> dict[str, str]:
    """Name -> text of each stage, its ancestors' before it."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]:
        base, name = re.match(r"FROM (\S+) AS (\w+)", part).groups()  # type: ignore[union-attr]
        found[name] = found.get(base, "") + part
    return found


def test_hadolint_finds_nothing() -> None:
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_finds_a_base_without_a_tag() -> None:
    done = lint(DOCKERFILE.replace("python:${PYTHON}-slim-bookworm", "python"))
    assert done.returncode != 0
    assert "DL3006" in done.stdout


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_runs_as_the_user_that_the_pods_run_as(stage: str) -> None:
    users = re.findall(r"^USER (.+)$", stages()[stage], re.MULTILINE)
    assert users == ["1000:1000"]
    assert "useradd --uid 1000" in stages()[stage]


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_is_pinned_and_holds_no_model_and_no_cache(stage: str) -> None:
    text = stages()[stage]
    installs = re.findall(r"pip install (.+)", text)
    assert installs
    assert all("--constraint /tmp/constraints.txt" in each for each in installs)
    assert "PIP_NO_CACHE_DIR=1" in text
    assert not re.search(r"smollm2|gguf|safetensors|huggingface-cli|hf download", text)
    assert "latest" not in text


def test_the_cpu_image_takes_torch_from_the_cpu_index_and_the_other_does_not() -> None:
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in stages()["cpu"]
    assert "download.pytorch.org" not in stages()["cuda"]


def test_the_image_is_built_from_every_package_and_from_nothing_else() -> None:
    assert IGNORED[1] == "*"
    let_in = {line[1:] for line in IGNORED if line.startswith("!")}
    copied = set(" ".join(re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)).split())
    assert set(PACKAGES) < copied
    assert let_in == copied
    assert [name for name in let_in if not (ROOT / name).exists()] == []


def test_the_tags_that_are_shown_are_the_version() -> None:
    assert re.findall(r"--tag kvpact:(\S+)", DOCKERFILE) == [VERSION, f"{VERSION}-cuda"]
