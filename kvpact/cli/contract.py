"""`kvpact contract`: shows what a cache's bytes mean, and checks whether two sides can share a cache."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvpact.cli.coordinator_client import AdminKeyFlag
from kvpact.cli.flags import ConfigFlag, JsonFlag, ModelFlag, TlsFlag
from kvpact.cli.output import EXIT_CONVERT, EXIT_REJECT, console, errors, print_json, reported_errors
from kvpact.errors import BadRequest
from kvpact.types import Role

if TYPE_CHECKING:
    from kvpact.cli.sources import Loaded
    from kvpact.types import Verdict

app = typer.Typer(help="Show contracts, and check whether two sides can share a cache.", no_args_is_help=True)

SOURCES = "Contract file, model folder, config.json, GGUF file, worker's host:port or model name."
SETTINGS = "key=value; may be repeated: cache.<key>, max_model_len, or a field of the model's config."

SERVER = "transformers, vllm or llama.cpp: whose rule picks the rotary table. Default: kvpact's own."
ServedBy = Annotated[str | None, typer.Option(metavar="SERVER", help=SERVER)]
WriterServedBy = Annotated[
    str | None, typer.Option(metavar="SERVER", help="--served-by of the writer alone.")
]
ReaderServedBy = Annotated[
    str | None, typer.Option(metavar="SERVER", help="--served-by of the reader alone.")
]
WriterArgument = Annotated[
    str | None, typer.Argument(metavar="WRITER", help=f"Prefill side. {SOURCES}", show_default=False)
]
ReaderArgument = Annotated[
    str | None, typer.Argument(metavar="READER", help=f"Decode side. {SOURCES}", show_default=False)
]
SettingsFlag = Annotated[list[str] | None, typer.Option(metavar="K=V", help=SETTINGS)]
ClusterFlag = Annotated[
    str | None, typer.Option(metavar="URL", help="Coordinator of a running cluster to check against.")
]
RoleFlag = Annotated[Role | None, typer.Option(help="With --against-cluster: what the worker will be.")]
WaitFlag = Annotated[
    float,
    typer.Option("--wait", min=0, metavar="SECONDS", help="Ask again so long while no coordinator answers."),
]
TerminationFlag = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the answer there too, such as /dev/termination-log."),
]


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
    tls: TlsFlag = None,
) -> None:
    """Prints the contract of a model: every field that decides what the bytes of its cache mean."""
    with reported_errors(as_json=json_output):
        from kvpact.cli.sources import load_source, parse_settings

        loaded = load_source(model, parse_settings("--set", setting or [], served_by), tls)
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
    writer: WriterArgument = None,
    reader: ReaderArgument = None,
    writer_set: SettingsFlag = None,
    reader_set: SettingsFlag = None,
    require: Annotated[Require, typer.Option(help="accept: a conversion exits 10.")] = Require.USABLE,
    json_output: JsonFlag = False,
    served_by: ServedBy = None,
    writer_served_by: WriterServedBy = None,
    reader_served_by: ReaderServedBy = None,
    tls: TlsFlag = None,
    against_cluster: ClusterFlag = None,
    role: RoleFlag = None,
    config: ConfigFlag = None,
    model: ModelFlag = None,
    admin_key_file: AdminKeyFlag = None,
    wait_s: WaitFlag = 0.0,
    termination_log: TerminationFlag = None,
) -> None:
    """Says whether READER can use what WRITER wrote: accept, convert or reject, and every difference.

    With --against-cluster: whether a worker with this config would find a partner in a running cluster.

    Exit code 0: usable. 10: convert, though accept was required. 20: reject. 3: unreadable side. 2: usage.
    1: no coordinator answers at --against-cluster.
    """
    with reported_errors(as_json=json_output):
        gate = Gate(against_cluster, role, config, model, admin_key_file, wait_s, termination_log)
        if against_cluster is not None:
            sides = (writer, reader, writer_set, reader_set, served_by, writer_served_by, reader_served_by)
            _refuse_beside_cluster((*sides, tls))
            code = _pass_gate(gate, require, json_output=json_output)
        else:
            gate.refuse_alone()
            writing = _Side("WRITER", writer, "--writer-set", writer_set, writer_served_by or served_by, tls)
            reading = _Side("READER", reader, "--reader-set", reader_set, reader_served_by or served_by, tls)
            code = _check_sides(writing, reading, require, json_output=json_output)
    raise typer.Exit(code)


class _Side(NamedTuple):
    """One side as the command line names it."""

    argument: str
    source: str | None
    flag: str
    settings: list[str] | None
    served_by: str | None
    tls: Path | None

    def load(self) -> Loaded:
        """Raises BadRequest where no source is named, and as `load_source`."""
        from kvpact.cli.sources import load_source, parse_settings

        if self.source is None:
            raise BadRequest(
                f"{self.argument} is missing; name both sides, or a cluster with --against-cluster"
            )
        settings = parse_settings(self.flag, self.settings or [], self.served_by)
        return load_source(self.source, settings, self.tls)


def _check_sides(writer: _Side, reader: _Side, require: Require, *, json_output: bool) -> int:
    from kvpact.cli.check_remedies import with_check_flags

    writing, reading = writer.load(), reader.load()
    _notes([("writer", writing), ("reader", reading)], json_output=json_output)
    verdict = with_check_flags(_compare(writing, reading))
    if json_output:
        from kvpact.contract.jsonform import verdict_to_json

        print_json(verdict_to_json(verdict))
    else:
        from kvpact.cli.contract_tables import print_verdict

        print_verdict(verdict)
    return _exit_code(verdict, require)


class Gate(NamedTuple):
    """A running cluster to ask."""

    url: str | None
    role: Role | None
    config: Path | None
    model: str | None
    admin_key_file: Path | None
    wait_s: float
    termination_log: Path | None

    def refuse_alone(self) -> None:
        """Raises BadRequest where something is asked that only a cluster can be asked."""
        for name, value in self._asdict().items():
            if value:
                flag = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise BadRequest(
                    f"{flag} needs --against-cluster; leave it out, or name a cluster", param=flag
                )


BESIDE_CLUSTER = (
    *("WRITER", "READER", "--writer-set", "--reader-set", "--served-by", "--writer-served-by"),
    *("--reader-served-by", "--tls"),
)


def _refuse_beside_cluster(asked: tuple[object, ...]) -> None:
    """`asked` are values in the order of BESIDE_CLUSTER."""
    for flag, value in zip(BESIDE_CLUSTER, asked, strict=True):
        if value:
            raise BadRequest(
                f"{flag} doesn't count with --against-cluster: the worker's side comes from --config, "
                "--model and --role alone; leave it out",
                param=flag,
            )


def _pass_gate(gate: Gate, require: Require, *, json_output: bool) -> int:
    """Asks the cluster; its answer goes to standard output, and to the termination log where there is one."""
    from threading import Event

    from kvpact.cli.coordinator_client import CoordinatorClient, read_key
    from kvpact.cli.gate import ask_gate, exit_code_of, lines_of, worker_contract, write_termination_message
    from kvpact.clock import MonotonicClock
    from kvpact.config import load_config
    from kvpact.engine.weights import resolve_model

    assert gate.url is not None, "a cluster was named"
    if gate.role is None:
        raise BadRequest("--role is missing: prefill or decode", param="--role")
    settings = load_config(gate.config, {} if gate.model is None else {"model": gate.model})
    contract = worker_contract(settings, resolve_model(settings.model), gate.role)
    with CoordinatorClient(gate.url, read_key(gate.admin_key_file), flag="--against-cluster") as client:
        answer = ask_gate(
            client, gate.role, contract, wait_s=gate.wait_s, now=MonotonicClock().now, sleep=Event().wait
        )
    lines = lines_of(answer)
    if gate.termination_log is not None:
        write_termination_message(gate.termination_log, lines)
    if json_output:
        print_json(answer)
    for line in () if json_output else lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return exit_code_of(answer, accept=require is Require.ACCEPT)


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
