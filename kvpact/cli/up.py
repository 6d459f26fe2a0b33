"""`kvpact up`: a cluster in the foreground; Ctrl-C drains it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
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
from kvpact.cli.output import console, print_json, progress, reported_errors
from kvpact.config import Config

if TYPE_CHECKING:
    from kvpact.cli.cluster import Cluster


def up(
    *,
    model: ModelFlag = None,
    config: ConfigFlag = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP side.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the HTTP side; 0 picks one.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Positions to serve, in tokens.")] = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Starts a local cluster and serves the OpenAI API until Ctrl-C.

    With --json one object with url and workers is printed once requests can be served or a refusal is known.
    """
    api = {key: value for key, value in {"host": host, "port": port}.items() if value is not None}
    more = {"prefill_workers": prefill, "decode_workers": decode, "max_model_len": max_model_len}
    with reported_errors(as_json=json_output):
        settings = cluster_config(
            model=model,
            config=config,
            prefill_cache=prefill_cache,
            decode_cache=decode_cache,
            prefill_override=prefill_override,
            decode_override=decode_override,
            more={key: value for key, value in more.items() if value is not None}
            | ({"api": api} if api else {}),
        )
        asyncio.run(_serve(settings, json_output=json_output))


async def _serve(config: Config, *, json_output: bool) -> None:
    """Serves until SIGINT or SIGTERM; a second one doesn't wait for running requests."""
    from kvpact.cli.cluster import local_cluster

    serving = asyncio.current_task()
    assert serving is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with local_cluster(config, progress) as cluster:
            _announce(cluster, json_output=json_output)
            try:
                await asyncio.Event().wait()
            finally:
                progress("draining")


def _announce(cluster: Cluster, *, json_output: bool) -> None:
    ready, why = cluster.coordinator.readiness()
    if json_output:
        print_json({"url": cluster.url, "ready": ready, "reason": why, "workers": cluster.workers})
        return
    for worker, endpoint in cluster.workers.items():
        console.print(f"  {worker:<12} {endpoint}", highlight=False)
    console.print(
        f"serving {cluster.url}/v1" if ready else f"not ready: {why}", highlight=False, soft_wrap=True
    )
