"""`kvpact status`: workers, pairs, verdicts and held blocks of a running cluster."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from kvpact.cli.coordinator_client import DEFAULT_URL, AdminKeyFlag, CoordinatorClient, UrlFlag, read_key
from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import console, print_json, reported_errors, show

UNREADY = 503
WORKER_FACTS = ("worker", "role", "endpoint", "contract", "running", "waiting", "free", "held", "state")
PAIR_FACTS = ("prefill", "decode", "verdict", "transport", "differs in", "trouble")


def status(
    *, url: UrlFlag = DEFAULT_URL, admin_key_file: AdminKeyFlag = None, json_output: JsonFlag = False
) -> None:
    """Shows the workers of a running cluster, which of them can share a cache, and why others can't."""
    with reported_errors(as_json=json_output):
        with CoordinatorClient(url, read_key(admin_key_file)) as client:
            found = {
                "url": url,
                **client.get("/ready", even_if=(UNREADY,)),
                **client.get("/admin/workers"),
                **client.get("/admin/pairs"),
            }
        if json_output:
            print_json(found)
            return
        _print(found)


def _print(found: dict[str, Any]) -> None:
    ready = "ready" if found["ready"] else "not ready"
    console.print(f"{found['url']}: {ready}", style="bold", highlight=False)
    for reason in found["reasons"]:
        console.print(f"  {reason['message']}", highlight=False, markup=False, soft_wrap=True)
    if found["workers"]:
        show(_workers(found["workers"]))
    if found["pairs"]:
        show(_pairs(found["pairs"]))
    for pair in found["pairs"]:
        _print_why(pair)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in (
        "worker",
        "role",
        "endpoint",
        "contract",
        "running",
        "waiting",
        "blocks free",
        "held",
        "state",
    ):
        table.add_column(heading)
    for each in workers:
        if "trouble" in each:
            table.add_row(each["worker"], each["role"], each["endpoint"], *[""] * 5, each["trouble"])
            continue
        blocks = each["blocks"]
        held = ", ".join(f"{reason} {count}" for reason, count in blocks.get("held", {}).items())
        table.add_row(
            each["worker"],
            each["role"],
            each["endpoint"],
            each["contract_digest"][:12],
            str(each["running_requests"]),
            str(each["waiting_requests"]),
            f"{blocks['free']}/{blocks['total']}",
            held,
            "draining" if each["draining"] else each.get("obstacle") or "",
        )
    return table


def _pairs(pairs: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in PAIR_FACTS:
        table.add_column(heading, overflow="fold")
    for each in pairs:
        table.add_row(
            each.get("prefill", "?"),
            each.get("decode", "?"),
            each["verdict"],
            (each.get("transport") or {}).get("name", ""),
            ", ".join(difference["field"] for difference in each.get("differences", [])),
            each.get("trouble") or "",
        )
    return table


def _print_why(pair: dict[str, Any]) -> None:
    """What refuses a pair, and what to do about it."""
    for difference in pair.get("differences", []):
        if difference["action"] != "reject":
            continue
        told = (difference.get("explanation"), difference.get("remedy"))
        for text in filter(None, told):
            console.print(f"{difference['field']}: {text}", highlight=False, markup=False, soft_wrap=True)
