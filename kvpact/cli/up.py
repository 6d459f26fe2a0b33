"""`kvpact up`: a cluster in the foreground; Ctrl-C drains it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpact.cli.flags import (
    AddressFlag,
    CaptureFlag,
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
from kvpact.cli.output import console, print_json, progress, reported_errors, say, show
from kvpact.cli.signals import stops
from kvpact.config import Config

if TYPE_CHECKING:
    from kvpact.cli.cluster import Cluster
    from kvpact.types import Verdict

DEFAULTS = Config()
PATIENT_SIGNALS = 4
"""So many after the first end requests and still let workers end in order."""
HOST = f"Address of the HTTP side. Default: {DEFAULTS.api.host}."
PORT = f"Port of the HTTP side; 0 picks one. Default: {DEFAULTS.api.port}."
LOCAL = (
    "Prompts of at most N tokens are computed by a decode worker itself, without a handoff. "
    f"Default: {DEFAULTS.local_prefill_max_tokens}."
)
CONTEXT = "Positions to serve, in tokens. Default: all that the model has."


def up(
    *,
    model: ModelFlag = None,
    config: ConfigFlag = None,
    address: AddressFlag = None,
    prefill: PrefillWorkersFlag = None,
    decode: DecodeWorkersFlag = None,
    host: Annotated[str | None, typer.Option(metavar="HOST", help=HOST)] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, metavar="PORT", help=PORT)] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, metavar="TOKENS", help=CONTEXT)] = None,
    local_prefill_max_tokens: Annotated[int | None, typer.Option(min=0, metavar="N", help=LOCAL)] = None,
    prefill_cache: PrefillCacheFlag = None,
    decode_cache: DecodeCacheFlag = None,
    prefill_override: PrefillOverrideFlag = None,
    decode_override: DecodeOverrideFlag = None,
    capture: CaptureFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Starts a cluster, here or on Ray nodes that --address names, and serves the OpenAI API until Ctrl-C.

    With --json one object with url, workers and registration, the address at which further workers register,
    is printed once requests can be served or a refusal is known.
    """
    more = {
        "prefill_workers": prefill,
        "decode_workers": decode,
        "max_model_len": max_model_len,
        "local_prefill_max_tokens": local_prefill_max_tokens,
        "api": {"host": host, "port": port},
        "handoff": {"capture": capture},
    }
    with reported_errors(as_json=json_output):
        sides = (prefill_cache, prefill_override), (decode_cache, decode_override)
        settings = deployment_config(model, config, sides, more)
        asyncio.run(_serve(settings, address, json_output=json_output))


async def _serve(config: Config, address: str | None, *, json_output: bool) -> None:
    """Serves until SIGINT or SIGTERM; a second ends running requests; many cancel the cleaning up."""
    from kvpact.cli.cluster import running_cluster

    if config.handoff.capture is not None:
        say(f"kvpact: handoffs are written to {config.handoff.capture}, prompts included")
    asked = asyncio.Event()
    with contextlib.suppress(asyncio.CancelledError), stops() as steps:
        async with running_cluster(config, progress, address=address) as cluster:
            steps.serving(asked.set, *[cluster.coordinator.cut] * PATIENT_SIGNALS)
            _announce(cluster, json_output=json_output)
            await asked.wait()
            _say_waiting(cluster.coordinator.running(), config.handoff.drain_s)


def _say_waiting(running: int, drain_s: float) -> None:
    if not running:
        progress("stopping")
        return
    requests = "1 request" if running == 1 else f"{running} requests"
    say(f"kvpact: waiting up to {drain_s:g} s for {requests}; Ctrl-C again to stop now")


def _announce(cluster: Cluster, *, json_output: bool) -> None:
    ready, why = cluster.coordinator.readiness()
    verdict = cluster.coordinator.refusal()
    if json_output:
        facts = {"url": cluster.url, "ready": ready, "reason": why, "workers": cluster.workers}
        facts["registration"] = cluster.registration
        print_json(facts | {"differences": _differences(verdict)})
        return
    for worker, endpoint in cluster.workers.items():
        console.print(f"  {worker:<12} {endpoint}", highlight=False)
    if ready:
        console.print(f"serving {cluster.url}/v1", highlight=False, soft_wrap=True)
        return
    if verdict is not None:
        from kvpact.cli.refusal import picture_refusal

        show(picture_refusal(verdict))
    what = "refused" if verdict is not None else f"not ready: {why}"
    line = f"{what}; {cluster.url}/v1 answers 503 until it is mended; Ctrl-C ends it"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _differences(verdict: Verdict | None) -> list[Any]:
    """What refuses, as `contract check --json` has it."""
    if verdict is None:
        return []
    from kvpact.contract.jsonform import verdict_to_json

    differences: list[Any] = verdict_to_json(verdict)["differences"]
    return differences
