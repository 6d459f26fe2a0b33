"""The `kvpact` command: mounts every subcommand; heavy imports wait until a command runs."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Annotated

import typer

from kvpact.cli import batch, contract, demo, doctor, drain, handoff, parity, scale, status, tls, up

# Libraries read these when a command imports them: no fork notices of gRPC, no progress bars of loaders.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvpact {importlib.metadata.version('kvpact')}")
        raise typer.Exit


@app.callback()
def kvpact(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Disaggregated prefill/decode serving whose KV-cache handoff carries a contract."""


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("batch")(batch.batch)
app.command("status")(status.status)
app.command("drain")(drain.drain)
app.command("scale")(scale.scale)
app.command("doctor")(doctor.doctor)
app.command("parity")(parity.parity)
app.add_typer(contract.app, name="contract")
app.add_typer(handoff.app, name="handoff")
app.add_typer(tls.app, name="tls")


def main() -> None:
    """Entry point of the console script."""
    app()
