"""Commands inside the manifests exist in the command line, with their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import typer

from kvpact.cli.main import app
from tests.k8s.manifests import RENDERED, Document, documents, of_kind, pods, ray_specs

COMMAND = re.compile(r"\bkvpact [a-z].*")


def commands(found: list[Document]) -> Iterator[list[str]]:
    """Words of each call of kvpact in containers, hooks and entrypoints."""
    lines = [each["spec"]["entrypoint"] for each in of_kind(found, "RayJob")]
    for container in (each for pod in pods(found) for each in pod.containers()):
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        for words in (container.get("command", []), hook):
            shell = words[:2] == ["bash", "-c"]
            lines += words[2].splitlines() if shell else [shlex.join(words)]
    for call in (match for line in lines for match in COMMAND.findall(line)):
        yield shlex.split(call.partition("||")[0])[1:]


def unknown_words(words: list[str]) -> list[str]:
    """Subcommands and flags that the command line doesn't have."""
    command = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        name = rest.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in flags]


@pytest.mark.parametrize("name", RENDERED)
def test_every_start_parameter_is_one_of_rays(name: str) -> None:
    from ray.scripts.scripts import start

    options = {flag.removeprefix("--") for parameter in start.params for flag in parameter.opts}
    for spec in ray_specs(documents(name)):
        for part in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert set(part["rayStartParams"]) <= options


@pytest.mark.parametrize("name", RENDERED)
def test_a_command_in_the_manifests_exists_with_its_flags(name: str) -> None:
    found = list(commands(documents(name)))
    assert found
    assert {" ".join(words): unknown for words in found if (unknown := unknown_words(words))} == {}


def test_serving_calls_the_server_the_gate_and_the_drain() -> None:
    assert {words[0] for words in commands(documents("base"))} == {"up", "contract", "drain"}


def test_a_command_or_flag_that_is_not_there_is_found() -> None:
    assert unknown_words(["serve"]) == ["serve"]
    assert unknown_words(["up", "--adress", "auto"]) == ["--adress"]
