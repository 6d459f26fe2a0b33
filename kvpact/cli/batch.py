"""`kvpact batch`: every line of an OpenAI batch file through a cluster, resumable, then exits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvpact.cli.coordinator_client import checked_url, read_key
from kvpact.cli.flags import (
    AddressFlag,
    ConfigFlag,
    DecodeCacheFlag,
    DecodeOverrideFlag,
    DecodeWorkersFlag,
    JsonFlag,
    ModelFlag,
    PrefillCacheFlag,
    PrefillOverrideFlag,
    PrefillWorkersFlag,
    deployment_config,
)
from kvpact.cli.output import EXIT_STOPPED, console, errors, print_json, progress, reported_errors, say
from kvpact.cli.signals import stops
from kvpact.config import Config
from kvpact.errors import NoCompatiblePair

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress

    from kvpact.cli.batch_output import BatchOutput
    from kvpact.cli.batch_tally import Tally

EXIT_LINES = 100
"""Exit code of a run with failed lines is this and their number, at most MOST_TOLD of it."""
MOST_TOLD = 20
"""Higher codes are those of timeouts and signals."""
ANSWER_DEADLINE_S = 3600.0
Source = Annotated[Path, typer.Argument(metavar="IN", help="Batch file in OpenAI's format, JSON lines.")]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="Where records go. One that is there is gone on with.")
]
ServerUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A server that runs already; without it a cluster is started."),
]
ApiKeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the server's API key.")]
AtOnce = Annotated[int, typer.Option(min=1, metavar="N", help="Lines under way at a time.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Do lines again that failed; their records are replaced.")
]


def batch(
    *,
    source: Source,
    output: Output,
    url: ServerUrl = None,
    api_key_file: ApiKeyFile = None,
    at_once: AtOnce = 32,
    retry_failed: RetryFailed = False,
    model: ModelFlag = None,
    config: ConfigFlag = None,
    address: AddressFlag = None,
    prefill: PrefillWorkersFlag = None,
    decode: DecodeWorkersFlag = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Runs a batch file through a cluster and writes a record for each line as soon as it is answered.

    A run that was ended goes on where it was: lines with a final record aren't done again. Exit code 0 when
    every line was answered well, else 100 and the number of lines that weren't, 120 for 20 and more; 130 when
    it was ended; 1 where no server answers.
    """
    more = {"prefill_workers": prefill, "decode_workers": decode, "api": {"port": 0}}
    with reported_errors(as_json=json_output):
        sides = (prefill_cache, prefill_override), (decode_cache, decode_override)
        settings = deployment_config(model, config, sides, more)
        server = None if url is None else checked_url(url)
        plan = _Plan(source, output, server, address, read_key(api_key_file), at_once, retry_failed)
        try:
            failures = asyncio.run(_run(plan, settings, json_output=json_output))
        except asyncio.CancelledError:
            raise typer.Exit(EXIT_STOPPED) from None
    if failures:
        raise typer.Exit(EXIT_LINES + min(failures, MOST_TOLD))


class _Plan(NamedTuple):
    """What is asked for beside the cluster's settings."""

    source: Path
    output: Path
    server: str | None
    address: str | None
    key: str | None
    at_once: int
    retry_failed: bool


async def _run(plan: _Plan, config: Config, *, json_output: bool) -> int:
    """Lines that failed, those of earlier runs included."""
    from kvpact.cli.batch_file import read_jobs
    from kvpact.cli.batch_output import BatchOutput

    with stops():
        await _check_server(plan)
        with BatchOutput(plan.output, retry_failed=plan.retry_failed) as records:
            due = sum(records.is_due(line) for line in read_jobs(plan.source))
            kept = records.tally.lines
            try:
                if due:
                    await _answer_all(plan, config, records, due)
            except asyncio.CancelledError:
                told = f"{records.tally.lines} of {due + kept} lines done"
                say(f"kvpact: ended; {told}; run the same command to go on")
                raise
    _print_summary(plan, due + kept, kept, records.tally, json_output=json_output)
    return records.tally.failed


async def _check_server(plan: _Plan) -> None:
    """Raises Unavailable where a server was named and none answers there."""
    from kvpact.cli.batch_run import check_alive

    if plan.server is not None:
        async with _client(plan.server, None) as client:
            await check_alive(client)


async def _answer_all(plan: _Plan, config: Config, records: BatchOutput, due: int) -> None:
    """Answers every line that is due. Raises BadRequest where the server refuses the key."""
    from kvpact.cli.batch_file import read_jobs
    from kvpact.cli.batch_run import Client, check_key, run_lines

    lines = (line for line in read_jobs(plan.source) if records.is_due(line))
    key, kept_failures, answered = key_to_show(plan.key, plan.server, config), records.tally.failed, False
    async with _server(plan, config) as base, _client(base, key) as client:
        with _bar() as bar:
            task = bar.add_task("batch", total=due, failed=0)
            outcomes = run_lines(lines, Client(client).send, at_once=plan.at_once)
            async with contextlib.aclosing(outcomes):
                async for record in outcomes:
                    if not answered and record["response"] is not None:
                        check_key(record)
                        answered = True
                    await asyncio.to_thread(records.append, record)
                    bar.update(task, advance=1, failed=records.tally.failed - kept_failures)


def _print_summary(plan: _Plan, lines: int, kept: int, tally: Tally, *, json_output: bool) -> None:
    if json_output:
        summary = {"lines": lines, "done_before": kept, "failed": tally.failed, "failures": tally.failures()}
        print_json({**summary, "output": str(plan.output)})
        return
    console.print(
        f"{lines} lines, {kept} of them done before, {tally.text()}; records in {plan.output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if tally.failed:
        say("kvpact: once the cause is mended, --retry-failed does these lines again")


def key_to_show(named: str | None, server: str | None, config: Config) -> str | None:
    """The key that was named; for a cluster of the batch's own, one of those that its settings ask for."""
    own = config.api.api_keys if server is None else ()
    return named or next(iter(own), None)


@contextlib.asynccontextmanager
async def _server(plan: _Plan, config: Config) -> AsyncIterator[str]:
    """Base URL of the server that was named, or of a cluster that lives as long as the batch."""
    if plan.server is not None:
        yield plan.server
        return
    from kvpact.cli.cluster import running_cluster

    async with running_cluster(config, progress, address=plan.address) as cluster:
        refusal = cluster.coordinator.refusal()
        if refusal is not None:
            raise NoCompatiblePair("no prefill worker and decode worker can share a cache", verdict=refusal)
        yield cluster.url


@contextlib.asynccontextmanager
async def _client(base: str, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    import httpx

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=httpx.Timeout(ANSWER_DEADLINE_S, connect=10.0)
    ) as client:
        yield client


def _bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("kvpact: {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=errors,
    )
