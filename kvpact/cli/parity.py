"""`kvpact parity`: proves on a checkpoint that decoding from a cache equals a full forward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.flags import (
    ConfigFlag,
    DecodeCacheFlag,
    DecodeOverrideFlag,
    JsonFlag,
    PrefillCacheFlag,
    PrefillOverrideFlag,
    cluster_config,
)
from kvpact.cli.output import EXIT_FAILED, print_json, progress, reported_errors
from kvpact.config import Config
from kvpact.errors import BadRequest

if TYPE_CHECKING:
    from kvpact.cli.parity_compare import LegReport

DEFAULT_LENGTHS = "1,15,16,17,33,128,513"
PLOT = "Draw layers by positions to a .png or .svg (needs kvpact\\[plot])."
OUTPUT_TOKENS = 2
"""The first comes from prefill, the second from the cache."""


def parity(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, GGUF file, hub id, or smollm2.")
    ],
    lengths: Annotated[
        str, typer.Option(metavar="N,...", help="Prompt lengths in tokens, separated by commas.")
    ] = DEFAULT_LENGTHS,
    config: ConfigFlag = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=PLOT),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Compares full forward with cached prefill and decode, without and with a handoff, layer by layer.

    Keys, values, attention logits and outputs of every layer, and final logits, for the token that is decoded
    from the cache. Exit code 0 when all is within 1e-4, 1 when something diverges, 20 when the decode side
    refuses the cache.
    """
    with reported_errors(as_json=json_output):
        _check_plot(plot)
        settings = cluster_config(
            model=model,
            config=config,
            prefill_cache=prefill_cache,
            decode_cache=decode_cache,
            prefill_override=prefill_override,
            decode_override=decode_override,
        )
        reports = asyncio.run(_run(settings, _parse_lengths(lengths)))
        _show(reports, plot, model=model, json_output=json_output)
    if not all(report.passed for report in reports):
        raise typer.Exit(EXIT_FAILED)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from kvpact.cli.parity_plot import check_plot

        check_plot(plot)


def _show(reports: list[LegReport], plot: Path | None, *, model: str, json_output: bool) -> None:
    from kvpact.cli.parity_report import print_reports, report_to_json

    if json_output:
        passed = all(report.passed for report in reports)
        print_json({"passed": passed, "legs": [report_to_json(report) for report in reports]})
    else:
        print_reports(reports)
    if plot is not None:
        from kvpact.cli.parity_plot import draw

        draw(reports, plot, model=model)
        progress(f"wrote {plot}")


async def _run(config: Config, lengths: tuple[int, ...]) -> list[LegReport]:
    from kvpact.engine.weights import resolve_model

    folder = resolve_model(config.model)
    _check_lengths(config, folder, lengths)
    from kvpact.cli.parity_run import run_parity
    from kvpact.engine.probe import Reference
    from kvpact.serving.engine_factory import load_engine

    progress("loading the reference and both sides")
    reference = Reference.load(folder, config.decode.override)
    # Every row that a report compares is computed and sent for it, and for no earlier length.
    computing = config.engine.model_copy(update={"prefix_cache": False})
    config = config.model_copy(update={"engine": computing})
    writer, reader = load_engine(config, config.prefill), load_engine(config, config.decode)
    for engine in (writer, reader):
        engine.start()
    reports = []
    try:
        async for report in run_parity(reference, writer, reader, lengths):
            progress(
                f"{report.prompt_tokens} tokens, {report.leg}: {'equal' if report.passed else 'differs'}"
            )
            reports.append(report)
    finally:
        for engine in (writer, reader):
            engine.close()
    return reports


def _check_lengths(config: Config, folder: Path, lengths: tuple[int, ...]) -> None:
    from kvpact.cli.preflight import side_contracts

    contexts = [contract.model.context_tokens for contract in side_contracts(config, folder).values()]
    if max(lengths) + OUTPUT_TOKENS > min(contexts):
        message = f"--lengths: {max(lengths)} and {OUTPUT_TOKENS} more tokens exceed the context of "
        raise BadRequest(f"{message}{min(contexts)} tokens", param="--lengths")


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise BadRequest(
            f"--lengths: found {text!r}, expected whole numbers from 1 on, like 1,16,17", param="--lengths"
        )
    return lengths
