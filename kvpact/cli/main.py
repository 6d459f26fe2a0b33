"""The `kvpact` command: mounts every subcommand; heavy imports wait until a command runs."""

from __future__ import annotations

import typer

from kvpact.cli import contract, demo, parity, up

app = typer.Typer(
    help="Disaggregated prefill/decode serving whose KV-cache handoff carries a contract.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("parity")(parity.parity)
app.add_typer(contract.app, name="contract")


def main() -> None:
    """Entry point of the console script."""
    app()
