"""`kvpact handoff`: looks into a captured handoff, and judges it again for any reader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import print_json, reported_errors

if TYPE_CHECKING:
    from kvpact.contract.contract import Contract

app = typer.Typer(help="Look into captured handoffs.", no_args_is_help=True)

READER = (
    "Whom to judge for, instead of the recorded reader: contract file, model folder, config.json or name."
)


@app.callback()
def handoff() -> None:
    """Looks into captured handoffs."""


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .kvpact file.")],
    reader: Annotated[str | None, typer.Option(metavar="FILE|MODEL", help=READER)] = None,
    json_output: JsonFlag = False,
) -> None:
    """Prints contract, verdict, plan, costs, witnesses and chunks of a captured handoff.

    The verdict is computed again. Exit code 3 for a file that is damaged or of another version.
    """
    with reported_errors(as_json=json_output):
        from kvpact.cli.handoff_facts import facts_to_json, handoff_facts
        from kvpact.handoff.capture_file import read_capture

        facts = handoff_facts(read_capture(file), None if reader is None else _reader_contract(reader))
        if json_output:
            print_json({"file": str(file), **facts_to_json(facts)})
            return
        from kvpact.cli.handoff_view import print_facts

        print_facts(str(file), facts)


def _reader_contract(text: str) -> Contract:
    from kvpact.cli.sources import load_source, parse_settings

    return load_source(text, parse_settings("--reader", [])).contract
