"""What commands print: one JSON object on stdout, or text for people; progress and errors go to stderr."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from kvpact.errors import BadRequest, ContractRefused, KvpactError, NoCompatiblePair, UnreadableSource

if TYPE_CHECKING:
    from kvpact.types import Verdict

OUR_PACKAGES = ("kvpact", "coordinator", "prefill_worker", "decode_worker")
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_CONVERT = 10
EXIT_REJECT = 20
EXIT_STOPPED = 130
TRAILING_SPACE = re.compile(r" +(?=(?:\x1b\[[0-9;]*m)*$)", re.MULTILINE)

console = Console()
errors = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """One object, one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def progress(step: str) -> None:
    """Says on stderr what is being waited for."""
    errors.print(f"[dim]kvpact: {escape(step)} ...[/dim]", highlight=False)


def show(picture: RenderableType, on: Console = console) -> None:
    """Prints tables and panels without the spaces that fill up their lines."""
    with on.capture() as captured:
        on.print(picture)
    on.file.write(TRAILING_SPACE.sub("", captured.get()))
    on.file.flush()


def say(line: str) -> None:
    """One line on stderr."""
    errors.print(line, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def reported_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turns a KvpactError or a missing package into text and exit code; what else is raised is a bug."""
    try:
        yield
    except KvpactError as error:
        verdict = error.verdict if isinstance(error, ContractRefused | NoCompatiblePair) else None
        if as_json:
            facts: dict[str, Any] = {"reason": error.reason, "message": str(error)} | error.metadata()
            print_json({"error": facts} | ({} if verdict is None else _differences(verdict)))
        else:
            _print_error(str(error))
            if verdict is not None:
                from kvpact.cli.refusal import picture_refusal

                show(picture_refusal(verdict), on=errors)
        raise typer.Exit(exit_code(error)) from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OUR_PACKAGES:
            raise
        message = (
            f"this command needs the package {error.name}, which isn't installed; run `make install` in a "
            "checkout, or pip install kvpact with its dependencies"
        )
        if as_json:
            print_json({"error": {"reason": "MISSING_PACKAGE", "message": message, "package": error.name}})
        else:
            _print_error(message)
        raise typer.Exit(EXIT_FAILED) from error


def _print_error(message: str) -> None:
    errors.print(f"[bold red]error[/bold red] {escape(message)}", highlight=False, soft_wrap=True)


def _differences(verdict: Verdict) -> dict[str, Any]:
    from kvpact.contract.jsonform import verdict_to_json

    return {"differences": verdict_to_json(verdict)["differences"]}


def exit_code(error: KvpactError) -> int:
    """Exit code of a command that ended with `error`."""
    if isinstance(error, BadRequest):
        return EXIT_USAGE
    if isinstance(error, UnreadableSource):
        return EXIT_UNREADABLE
    if isinstance(error, ContractRefused | NoCompatiblePair):
        return EXIT_REJECT
    return EXIT_FAILED
