"""`kvpact demo`: prompts through two worker processes, and a report of each handoff."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvpact.cli.flags import (
    ConfigFlag,
    DecodeCacheFlag,
    DecodeOverrideFlag,
    JsonFlag,
    ModelFlag,
    PrefillCacheFlag,
    PrefillOverrideFlag,
    cluster_config,
)
from kvpact.cli.output import EXIT_REJECT, EXIT_STOPPED, print_json, progress, reported_errors
from kvpact.cli.signals import stops
from kvpact.config import Config
from kvpact.errors import BadRequest

if TYPE_CHECKING:
    from kvpact.cli.cluster import Cluster

DEFAULT_PROMPT = "What is the capital of France?"


def demo(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What to ask; may be repeated, one handoff each.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Output tokens per prompt.")] = 48,
    model: ModelFlag = None,
    config: ConfigFlag = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Asks a model through one prefill and one decode process and shows verdict, plan, bytes and times.

    Exit code 0 when every handoff was accepted or converted, 20 when the decode side refused it.
    """
    with reported_errors(as_json=json_output):
        prompts = prompt or [DEFAULT_PROMPT]
        if json_output and len(prompts) > 1:
            raise BadRequest("demo --json takes one --prompt, found several", param="--prompt")
        settings = cluster_config(
            model=model,
            config=config,
            prefill_cache=prefill_cache,
            decode_cache=decode_cache,
            prefill_override=prefill_override,
            decode_override=decode_override,
            more={"api": {"port": 0}, "prefill_workers": 1, "decode_workers": 1},
        )
        try:
            refused = asyncio.run(_run(settings, prompts, max_tokens, json_output=json_output))
        except asyncio.CancelledError:
            raise typer.Exit(EXIT_STOPPED) from None
    if refused:
        raise typer.Exit(EXIT_REJECT)


async def _run(config: Config, prompts: list[str], max_tokens: int, *, json_output: bool) -> bool:
    from kvpact.cli.cluster import running_cluster

    with stops():
        async with running_cluster(config, progress) as cluster:
            return await _ask_all(cluster, prompts, max_tokens, json_output=json_output)


async def _ask_all(cluster: Cluster, prompts: list[str], max_tokens: int, *, json_output: bool) -> bool:
    from kvpact.cli.demo_report import ask, print_answer, print_pair

    for index, prompt in enumerate(prompts):
        report = await ask(cluster.coordinator, prompt, max_tokens)
        if json_output:
            print_json(report.to_json())
            return report.refused
        if index == 0:
            print_pair(report)
        print_answer(report)
        if report.refused:
            return True
    return False
