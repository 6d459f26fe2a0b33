"""`kvpact contract`: shows what a cache's bytes mean, and checks whether two sides can share a cache."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.output import EXIT_CONVERT, EXIT_REJECT, console, errors, print_json, reported_errors

if TYPE_CHECKING:
    from kvpact.cli.sources import Loaded
    from kvpact.types import Verdict

app = typer.Typer(help="Show contracts, and check whether two sides can share a cache.", no_args_is_help=True)

SOURCES = "Contract file, model folder, config.json, GGUF file, worker's host:port or model name."
SETTINGS = "key=value; may be repeated: cache.<key>, max_model_len, or a field of the model's config."

SERVER = "transformers, vllm or llama.cpp: whose rule picks the rotary table. Default: kvpact's own."
ServedBy = Annotated[str | None, typer.Option(metavar="SERVER", help=SERVER)]


class Require(StrEnum):
    """How good a verdict must be for exit code 0."""

    USABLE = "usable"
    ACCEPT = "accept"


@app.command("show")
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCES)],
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="K=V", help=SETTINGS)] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the contract file.")] = False,
    served_by: ServedBy = None,
    cost: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Show instead what a cache of so many tokens costs."),
    ] = None,
) -> None:
    """Prints the contract of a model: every field that decides what the bytes of its cache mean."""
    with reported_errors(as_json=json_output):
        from kvpact.cli.sources import load_source, parse_settings

        loaded = load_source(model, parse_settings("--set", setting or [], served_by))
        _notes([("contract", loaded)], json_output=json_output)
        if cost is not None:
            _show_cost(loaded, cost, as_json=json_output)
            return
        if json_output:
            from kvpact.contract.jsonform import contract_to_json

            print_json(contract_to_json(loaded.contract))
            return
        from kvpact.cli.contract_tables import print_contract

        print_contract(loaded.contract)


@app.command("check")
def check(
    writer: Annotated[str, typer.Argument(metavar="WRITER", help=f"Prefill side. {SOURCES}")],
    reader: Annotated[str, typer.Argument(metavar="READER", help=f"Decode side. {SOURCES}")],
    writer_set: Annotated[list[str] | None, typer.Option(metavar="K=V", help=SETTINGS)] = None,
    reader_set: Annotated[list[str] | None, typer.Option(metavar="K=V", help=SETTINGS)] = None,
    require: Annotated[Require, typer.Option(help="accept: a conversion exits 10.")] = Require.USABLE,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    served_by: ServedBy = None,
    writer_served_by: Annotated[
        str | None, typer.Option(metavar="SERVER", help="--served-by of the writer alone.")
    ] = None,
    reader_served_by: Annotated[
        str | None, typer.Option(metavar="SERVER", help="--served-by of the reader alone.")
    ] = None,
) -> None:
    """Says whether READER can use what WRITER wrote: accept, convert or reject, and every difference.

    Exit code 0: usable. 10: convert, though accept was required. 20: reject. 3: unreadable side. 2: usage.
    """
    with reported_errors(as_json=json_output):
        from kvpact.cli.check_remedies import with_check_flags
        from kvpact.cli.sources import load_source, parse_settings

        writer_settings = parse_settings("--writer-set", writer_set or [], writer_served_by or served_by)
        reader_settings = parse_settings("--reader-set", reader_set or [], reader_served_by or served_by)
        writing, reading = load_source(writer, writer_settings), load_source(reader, reader_settings)
        _notes([("writer", writing), ("reader", reading)], json_output=json_output)
        verdict = with_check_flags(_compare(writing, reading))
        if json_output:
            from kvpact.contract.jsonform import verdict_to_json

            print_json(verdict_to_json(verdict))
        else:
            from kvpact.cli.contract_tables import print_verdict

            print_verdict(verdict)
    raise typer.Exit(_exit_code(verdict, require))


def _show_cost(loaded: Loaded, tokens: int, *, as_json: bool) -> None:
    from kvpact.cli.ledger_table import ledger_to_json, print_ledger
    from kvpact.contract.ledger import ledger

    costs = ledger(loaded.contract, tokens)
    if as_json:
        print_json(ledger_to_json(costs))
    else:
        print_ledger(costs)


def _compare(writer: Loaded, reader: Loaded) -> Verdict:
    from kvpact.contract.compare import Policy, compare, pairing_reach

    reach = pairing_reach(writer.contract, reader.contract)
    return compare(writer.contract, reader.contract, Policy(), reach)


def _exit_code(verdict: Verdict, require: Require) -> int:
    from kvpact.types import VerdictWord

    match verdict.word:
        case VerdictWord.ACCEPT:
            return 0
        case VerdictWord.CONVERT:
            return EXIT_CONVERT if require is Require.ACCEPT else 0
        case VerdictWord.REJECT:
            return EXIT_REJECT


def _notes(sides: list[tuple[str, Loaded]], *, json_output: bool) -> None:
    """Says where the form of each cache comes from, and on stderr what was not understood."""
    out = errors if json_output else console
    for side, loaded in sides:
        line = f"{side} {loaded.source}: cache: {loaded.cache}"
        out.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        for warning in loaded.warnings:
            errors.print(f"warning: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
