"""`kvpact handoff`: looks into captured handoffs, judges them again for any reader, replays them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.flags import JsonFlag, TlsFlag
from kvpact.cli.output import EXIT_REJECT, print_json, reported_errors
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import VerdictWord

if TYPE_CHECKING:
    from kvpact.contract.contract import Contract

app = typer.Typer(help="Look into captured handoffs, replay them.", no_args_is_help=True)

READER = (
    "Whom to judge for, instead of the recorded reader: contract file, model folder, config.json or name."
)

MODEL = (
    "Model of the reader: folder, GGUF file, hub id or smollm2. Its engine lands, checks and judges. "
    "Default: a cache of the recorded form without an engine; a canary is then judged as recorded."
)
CACHE = "Cache of the reader: key_state, axis_order, block_size, dtype, stored_lane_order."
MOST_NAMED = 5
"""Files of a folder that a message names."""
TOKENS = "Output tokens to show, the writer's first included; the others are decoded."


@app.callback()
def handoff() -> None:
    """Looks into captured handoffs, replays them."""


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

        _refuse_folder(file)
        facts = handoff_facts(read_capture(file), None if reader is None else _reader_contract(reader))
        if json_output:
            print_json({"file": str(file), **facts_to_json(facts)})
            return
        from kvpact.cli.handoff_view import print_facts

        print_facts(str(file), facts)


@app.command("replay")
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .kvpact file.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=MODEL)] = None,
    cache: Annotated[str | None, typer.Option(metavar="K=V,...", help=CACHE)] = None,
    override: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Model config field; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, metavar="N", help=TOKENS)] = 0,
    json_output: JsonFlag = False,
) -> None:
    """Gives a captured handoff to a fresh reader and says whether it ends as it was recorded.

    The reader goes by the recorded name, and grants the recorded generation and nonce. Exit code 0: same
    outcome; 20: another one; 3: a file that is damaged or of another version.
    """
    with reported_errors(as_json=json_output):
        given = {"--cache": cache, "--override": override, "--tokens": tokens}
        needy = [flag for flag, value in given.items() if value]
        if model is None and needy:
            raise BadRequest(f"{' and '.join(needy)}: name the reader's --model too", param="--model")
        _refuse_folder(file)
        from kvpact.cli.handoff_replay import ReplayOrder, replay_file

        replayed = replay_file(
            ReplayOrder(file=file, model=model, cache=cache, override=override, tokens=tokens)
        )
        if json_output:
            print_json({"file": str(file), **replayed.to_json()})
        else:
            from kvpact.cli.handoff_replay_view import print_replay

            print_replay(str(file), replayed)
    if replayed.replay.differences():
        raise typer.Exit(EXIT_REJECT)


@app.command("verdict")
def verdict(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="host:port of a decode worker.")],
    writer_digest: Annotated[
        str, typer.Argument(metavar="WRITER_DIGEST", help="Digest of the writer's contract, hexadecimal.")
    ],
    reader: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="The reader's digest. Default: that of WORKER.")
    ] = None,
    tls: TlsFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Prints the whole verdict that a decode worker gave a writer; a refusal in a log names the digests.

    Exit code 0 usable, 20 reject, 2 where that worker judged no such pair.
    """
    with reported_errors(as_json=json_output):
        from kvpact.cli.handoff_verdict import ask_verdict
        from kvpact.contract.jsonform import verdict_to_json

        found = ask_verdict(worker, writer_digest, reader, tls)
        if json_output:
            print_json(verdict_to_json(found))
        else:
            from kvpact.cli.contract_tables import print_verdict

            print_verdict(found)
    if found.word is VerdictWord.REJECT:
        raise typer.Exit(EXIT_REJECT)


def _refuse_folder(path: Path) -> None:
    """Raises UnreadableSource that lists what could be named instead."""
    if not path.is_dir():
        return
    files = sorted(str(file) for file in path.rglob("*.kvpact"))
    named = ", ".join(files[:MOST_NAMED]) + (
        f" and {len(files) - MOST_NAMED} more" if files[MOST_NAMED:] else ""
    )
    raise UnreadableSource(f"{path} is a folder; .kvpact files in it: {named or 'none'}", source=str(path))


def _reader_contract(text: str) -> Contract:
    from kvpact.cli.sources import load_source, parse_settings

    return load_source(text, parse_settings("--reader", [])).contract
