"""`kvpact status`: workers, pairs, verdicts and held blocks of a running cluster."""

from __future__ import annotations

from typing import Any

from kvpact.cli.columns import show_columns
from kvpact.cli.coordinator_client import DEFAULT_URL, AdminKeyFlag, CoordinatorClient, UrlFlag, read_key
from kvpact.cli.flags import JsonFlag
from kvpact.cli.output import console, print_json, reported_errors
from kvpact.errors import KvpactError

UNREADY = 503
WORKER_FACTS = (
    *("worker", "role", "endpoint", "contract", "running", "waiting"),
    *("blocks free", "held", "state"),
)
SPARE_FACTS = ("contract", "held", "role", "waiting", "running", "blocks free")
"""Left out one by one where a terminal is too narrow."""
PAIR_FACTS = ("prefill", "decode", "verdict", "transport", "differs in", "trouble")


def status(
    *, url: UrlFlag = DEFAULT_URL, admin_key_file: AdminKeyFlag = None, json_output: JsonFlag = False
) -> None:
    """Shows the workers of a running cluster, which of them can share a cache, and why others can't."""
    with reported_errors(as_json=json_output):
        with CoordinatorClient(url, read_key(admin_key_file)) as client:
            ready = client.get("/ready", even_if=(UNREADY,))
            if "ready" not in ready:
                raise KvpactError(f"{url} isn't a kvpact coordinator: it answers /ready otherwise; see --url")
            found = {
                "url": url,
                **ready,
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
        rows = [_worker(each) for each in found["workers"]]
        show_columns(WORKER_FACTS, rows, spare=SPARE_FACTS, texts=("state",))
    if found["pairs"]:
        rows = [_pair(each) for each in found["pairs"]]
        show_columns(PAIR_FACTS, rows, spare=("transport",), texts=("differs in", "trouble"))
    for pair in found["pairs"]:
        _print_why(pair)


def _worker(each: dict[str, Any]) -> list[str]:
    """Cells of one worker."""
    told = [each["worker"], each["role"], each["endpoint"], each["contract_digest"][:12]]
    if "trouble" in each:
        return [*told, "", "", "", "", each["trouble"]]
    blocks = each["blocks"]
    return [
        *told,
        str(each["running_requests"]),
        str(each["waiting_requests"]),
        f"{blocks['free']}/{blocks['total']}",
        ", ".join(f"{reason} {count}" for reason, count in blocks.get("held", {}).items()),
        "draining" if each["draining"] else each.get("obstacle") or "",
    ]


def _pair(each: dict[str, Any]) -> list[str]:
    """Cells of one pair."""
    return [
        each.get("prefill", "?"),
        each.get("decode", "?"),
        each["verdict"],
        (each.get("transport") or {}).get("name", ""),
        ", ".join(difference["field"] for difference in each.get("differences", [])),
        each.get("trouble") or "",
    ]


def _print_why(pair: dict[str, Any]) -> None:
    """What refuses a pair, and what to do about it."""
    for difference in pair.get("differences", []):
        if difference["action"] != "reject":
            continue
        told = (difference.get("explanation"), difference.get("remedy"))
        for text in filter(None, told):
            console.print(f"{difference['field']}: {text}", highlight=False, markup=False, soft_wrap=True)
