"""`kvpact parity`: proves on a checkpoint that decoding from a cache equals a full forward."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

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
from kvpact.cli.output import EXIT_FAILED, console, print_json, progress, reported_errors
from kvpact.config import Config
from kvpact.errors import BadRequest

if TYPE_CHECKING:
    from kvpact.cli.parity_run import LegReport

DEFAULT_LENGTHS = "1,15,16,17,33,128,513"


def parity(
    *,
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file, hub id, or smollm2.")],
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = DEFAULT_LENGTHS,
    config: ConfigFlag = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Compares full forward with cached prefill and decode, without and with a handoff, layer by layer.

    Exit code 0 when all is within 1e-4, 1 when something diverges, 20 when the decode side refuses the cache.
    """
    with reported_errors(as_json=json_output):
        settings = cluster_config(
            model=model,
            config=config,
            prefill_cache=prefill_cache,
            decode_cache=decode_cache,
            prefill_override=prefill_override,
            decode_override=decode_override,
        )
        reports = asyncio.run(_run(settings, _parse_lengths(lengths)))
        passed = all(report.passed for report in reports)
        if json_output:
            print_json({"passed": passed, "legs": [_to_json(report) for report in reports]})
        else:
            _print(reports)
    if not passed:
        raise typer.Exit(EXIT_FAILED)


async def _run(config: Config, lengths: tuple[int, ...]) -> list[LegReport]:
    from kvpact.cli.parity_run import OUTPUT_TOKENS, run_parity
    from kvpact.engine.probe import Reference
    from kvpact.engine.weights import resolve_model
    from kvpact.serving.engine_factory import load_engine

    progress("loading the reference and both sides")
    folder = resolve_model(config.model)
    reference = Reference.load(folder, config.decode.override)
    writer, reader = load_engine(config, config.prefill), load_engine(config, config.decode)
    context = min(engine.contract.model.context_tokens for engine in (writer, reader))
    if max(lengths) + OUTPUT_TOKENS > context:
        message = f"--lengths: {max(lengths)} and {OUTPUT_TOKENS} more tokens exceed the context of {context}"
        raise BadRequest(message, param="--lengths")
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


def _to_json(report: LegReport) -> dict[str, Any]:
    found = report.divergence
    return {
        "leg": report.leg,
        "prompt_tokens": report.prompt_tokens,
        "passed": report.passed,
        "tolerance": report.tolerance,
        "attention_max_abs": list(report.attention_max_abs),
        "logits_max_abs": report.logits_max_abs,
        "first_divergence": found
        and {
            "layer": found.layer,
            "position": found.position,
            "head": found.head,
            "key_position": found.key_position,
            "reference": found.reference,
            "found": found.found,
        },
    }


def _print(reports: list[LegReport]) -> None:
    from rich.table import Table

    table = Table(
        "prompt tokens", "leg", "attention logits", "final logits", "result", title="largest difference"
    )
    for report in reports:
        result = "equal" if report.passed else "[red]differs[/red]"
        attention, logits = f"{max(report.attention_max_abs):.2e}", f"{report.logits_max_abs:.2e}"
        table.add_row(str(report.prompt_tokens), report.leg, attention, logits, result)
    console.print(table)
    for report in reports:
        if not report.passed:
            console.print(_explain(report), highlight=False, soft_wrap=True)


def _explain(report: LegReport) -> str:
    where, found = f"{report.leg}, {report.prompt_tokens} prompt tokens", report.divergence
    if found is None:
        return f"{where}: attention is equal, final logits are off by {report.logits_max_abs:.2e}"
    return (
        f"{where}: diverges at layer {found.layer}, position {found.position}: head {found.head}, "
        f"key position {found.key_position}: attention logit {found.reference:.5f} became {found.found:.5f}"
    )
