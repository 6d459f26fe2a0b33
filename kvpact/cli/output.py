"""What commands print: one JSON object on stdout, or text for people; progress and errors go to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from kvpact.errors import BadRequest, ContractRefused, KvpactError, NoCompatiblePair, UnreadableSource

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_CONVERT = 10
EXIT_REJECT = 20

console = Console()
errors = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """One object, one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def progress(step: str) -> None:
    """Says on stderr what is being waited for."""
    errors.print(f"[dim]kvpact: {step} ...[/dim]", highlight=False)


@contextlib.contextmanager
def reported_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turns a KvpactError into its text and exit code; everything else is a bug and keeps its traceback."""
    try:
        yield
    except KvpactError as error:
        if as_json:
            print_json({"error": {"reason": error.reason, "message": str(error)} | error.metadata()})
        else:
            errors.print(f"[bold red]error[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(exit_code(error)) from error


def exit_code(error: KvpactError) -> int:
    """Exit code of a command that ended with `error`."""
    if isinstance(error, BadRequest):
        return EXIT_USAGE
    if isinstance(error, UnreadableSource):
        return EXIT_UNREADABLE
    if isinstance(error, ContractRefused | NoCompatiblePair):
        return EXIT_REJECT
    return EXIT_FAILED
