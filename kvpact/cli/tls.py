"""`kvpact tls`: certificates for development."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import console, print_json, reported_errors, show

if TYPE_CHECKING:
    from datetime import datetime

    from kvpact.cli.development_ca import MadeFile

app = typer.Typer(help="Make certificates for development.", no_args_is_help=True)

MOST_DAYS = 3650


@app.callback()
def tls() -> None:
    """Makes certificates for development."""


@app.command("init")
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write; made if it isn't there.")
    ],
    days: Annotated[
        int, typer.Option(min=1, max=MOST_DAYS, metavar="N", help="How long they are valid.")
    ] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace what DIR holds by a new CA's.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Makes a CA and a certificate for each role, for tls.directory in the settings.

    Running processes use new files for new connections. Exit code 2 where files are there, without --force.
    """
    with reported_errors(as_json=json_output):
        from kvpact.cli.development_ca import make_files, write_files
        from kvpact.clock import wall_time_s

        folder = directory.expanduser().absolute()
        files, until = make_files(days=days, now_s=wall_time_s())
        write_files(folder, files, force=force)
        if json_output:
            names = [file.name for file in files]
            print_json({"directory": str(folder), "files": names, "expires": until.isoformat()})
        else:
            _print(folder, files, until)


def _print(folder: Path, files: list[MadeFile], until: datetime) -> None:
    from rich.table import Table

    table = Table("file", "what it holds", "mode", title=str(folder), title_justify="left")
    for file in files:
        table.add_row(file.name, file.holds, f"{file.mode:o}")
    show(table)
    text = (
        f"They expire on {until:%Y-%m-%d %H:%M} UTC. Whoever has ca.key can be any role: keep it apart.\n"
        f"In the file for --config:\n\ntls:\n  directory: {folder}\n"
    )
    console.print(text, highlight=False, markup=False, soft_wrap=True)
