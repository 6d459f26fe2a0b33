"""Commands that the documents show exist: make targets, kvpact subcommands and their flags."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from tests.repo.tree import ROOT

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/settings.md",
    "docs/security.md",
    "docs/operations.md",
    "k8s/README.md",
)
HUB_ID = "org/name"
"""What the documents write for a model's name on the hub."""


class Shown(NamedTuple):
    """One command in a shell block of a document."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.words)}"


def shown_commands(program: str) -> list[Shown]:
    """Every command of a program in the documents' shell blocks, continued lines joined."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = [line.removeprefix("$ ") for line in block.splitlines()]
            calls = [line for line in lines if line and Path(line.split()[0]).name == program]
            found += [Shown(document, tuple(shlex.split(call, comments=True)[1:])) for call in calls]
    return found


def make_targets() -> set[str]:
    """Targets that the Makefile defines."""
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("shown", shown_commands("make"), ids=str)
def test_a_make_target_in_the_documents_exists(shown: Shown) -> None:
    assert {word for word in shown.words if "=" not in word} <= make_targets()


@pytest.mark.parametrize("shown", shown_commands("kvpact"), ids=str)
def test_a_kvpact_command_in_the_documents_exists_with_its_flags(shown: Shown) -> None:
    from kvpact.cli.main import app

    command = typer.main.get_command(app)
    words = list(shown.words)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    flags = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    assert {word.split("=", 1)[0] for word in words if word.startswith("--")} <= flags


def test_the_two_commands_of_the_first_screen_are_shown() -> None:
    assert {"demo", "test"} <= {word for shown in shown_commands("make") for word in shown.words}


def test_torch_cpu_takes_torch_alone_from_the_cpu_index(tmp_path: Path) -> None:
    plan = dry_run("install", "TORCH=cpu", f"VENV={tmp_path}/venv")
    from_index = [line for line in plan if "--index-url https://download.pytorch.org/whl/cpu" in line]
    assert len(from_index) == 1
    assert from_index[0].endswith(" torch")
    assert "--no-deps" in from_index[0]
    assert "--constraint constraints.txt" in from_index[0]


def test_without_torch_cpu_no_index_is_named(tmp_path: Path) -> None:
    assert not any("index-url" in line for line in dry_run("install", f"VENV={tmp_path}/venv"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_the_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text)) - {HUB_ID}
    links = {target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [target for target in links if not ((ROOT / document).parent / target).exists()]
    assert missing == []


def dry_run(*words: str) -> list[str]:
    """The commands that make would run."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
