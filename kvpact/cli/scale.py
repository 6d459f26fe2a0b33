"""`kvpact scale`: changes how many workers a cluster of `kvpact up` has."""

from __future__ import annotations

from threading import Event
from typing import Annotated, Any

import typer

from kvpact.cli.coordinator_client import DEFAULT_URL, AdminKeyFlag, CoordinatorClient, UrlFlag, read_key
from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import EXIT_FAILED, console, print_json, progress, reported_errors
from kvpact.clock import MonotonicClock
from kvpact.errors import BadRequest

ASK_AGAIN_S = 0.5
COUNT = "{} workers that there should be. Default: as many as there are."


def scale(
    *,
    prefill: Annotated[int | None, typer.Option(min=1, metavar="N", help=COUNT.format("Prefill"))] = None,
    decode: Annotated[int | None, typer.Option(min=1, metavar="N", help=COUNT.format("Decode"))] = None,
    url: UrlFlag = DEFAULT_URL,
    admin_key_file: AdminKeyFlag = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="Wait so long until it is so.")
    ] = 300.0,
    json_output: JsonFlag = False,
) -> None:
    """Starts workers, or drains the youngest and ends them, until as many serve as asked.

    A worker that drains doesn't serve: it leaves first, and another one starts where too few are left.
    Exit code 0: it is so. 1: not yet when the time was over; the cluster goes on with it.
    """
    wanted = {"prefill": prefill, "decode": decode}
    asked = {role: count for role, count in wanted.items() if count is not None}
    with reported_errors(as_json=json_output), CoordinatorClient(url, read_key(admin_key_file)) as client:
        if not asked:
            raise BadRequest("say how many: --prefill N, --decode N or both")
        clock = MonotonicClock()
        deadline_s = clock.now() + wait_s
        leaving = client.post("/admin/scale", asked)["leaving"]
        found = _count(client.get("/admin/workers")["workers"], asked)
        if leaving or found != asked:
            progress(f"{', '.join(leaving)} will leave" if leaving else "starting workers")
        same = not leaving and found == asked
        while found != asked and clock.now() < deadline_s:
            Event().wait(ASK_AGAIN_S)
            found = _count(client.get("/admin/workers")["workers"], asked)
    if json_output:
        print_json({"wanted": asked, "found": found, "leaving": leaving})
    else:
        there = ", ".join(f"{count} {role}" for role, count in found.items())
        console.print(f"{there} workers serve{'; nothing to change' if same else ''}", highlight=False)
    if found != asked:
        raise typer.Exit(EXIT_FAILED)


def _count(workers: list[dict[str, Any]], roles: dict[str, int]) -> dict[str, int]:
    """Workers of the coordinator's own that serve and take new work, by role."""
    own = [each for each in workers if each["started_here"] and "trouble" not in each]
    serving = [each["role"] for each in own if not each["draining"]]
    return {role: serving.count(role) for role in roles}
