"""`kvpact drain`: a worker takes no new work and finishes what it has."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event
from typing import Annotated, Any

import typer

from kvpact.cli.coordinator_client import DEFAULT_URL, AdminKeyFlag, CoordinatorClient, UrlFlag, read_key
from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import EXIT_FAILED, console, print_json, progress, reported_errors, say
from kvpact.clock import MonotonicClock
from kvpact.config import Config

ASK_AGAIN_S = 0.5
DEFAULT_S = Config().handoff.drain_s


def drain(
    *,
    worker: Annotated[
        str,
        typer.Argument(metavar="WORKER", help="Name as `kvpact status` shows it, or a machine's address."),
    ],
    url: UrlFlag = DEFAULT_URL,
    admin_key_file: AdminKeyFlag = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="Wait so long for its work to end.")
    ] = DEFAULT_S,
    json_output: JsonFlag = False,
) -> None:
    """Lets a worker take no new work, and waits until it holds none: then it can be ended without a loss.

    That is final: a drained worker never serves again; end it, and start another. An address means every
    worker of that machine. Exit code 0: idle. 1: still at work after --wait; it drains on.
    """
    with reported_errors(as_json=json_output), CoordinatorClient(url, read_key(admin_key_file)) as client:
        clock = MonotonicClock()
        deadline_s = clock.now() + wait_s
        drained = client.post("/admin/drain", {"worker": worker})["workers"]
        left = {each["worker"]: each["running_requests"] for each in drained}
        _warn(client.get("/admin/workers")["workers"], left)
        if any(left.values()):
            progress(f"{', '.join(left)}: {sum(left.values())} requests to finish")
        while any(left.values()) and clock.now() < deadline_s:
            Event().wait(ASK_AGAIN_S)
            left = requests_left(client.get("/admin/workers")["workers"], left)
    if json_output:
        print_json({"workers": left, "idle": not any(left.values())})
    for name, count in {} if json_output else left.items():
        state = f"still has {count} requests" if count else "is idle"
        console.print(f"{name} {state} and takes no new work", highlight=False)
    if any(left.values()):
        raise typer.Exit(EXIT_FAILED)


def _warn(workers: list[dict[str, Any]], drained: Mapping[str, int]) -> None:
    """Says on stderr where no worker of a role is left that can serve."""
    for role in sorted({each["role"] for each in workers if each["worker"] in drained}):
        of_role = [each for each in workers if each["role"] == role]
        serving = [each for each in of_role if not each.get("draining", True)]
        if not any(each["worker"] not in drained for each in serving):
            say(
                f"warning: no {role} worker is left that takes requests; start another "
                f"(kvpact scale --{role} N, where `kvpact up` started it)"
            )


def requests_left(workers: list[dict[str, Any]], before: Mapping[str, int]) -> dict[str, int]:
    """Requests that workers still have, by name; 0 of one that is gone, as `before` of one that is mute."""
    found = {each["worker"]: each for each in workers}
    return {name: _held(found[name], known) if name in found else 0 for name, known in before.items()}


def _held(worker: Mapping[str, Any], known: int) -> int:
    return known if "trouble" in worker else worker["running_requests"] + worker["waiting_requests"]
