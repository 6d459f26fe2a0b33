"""The costs of a cache as text for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvpact.cli.output import console
from kvpact.contract.ledger import Ledger


def ledger_to_json(costs: Ledger) -> dict[str, Any]:
    """Every number of the ledger by its name."""
    return asdict(costs)


def print_ledger(costs: Ledger) -> None:
    """A table of bytes and work."""
    table = Table(title=f"cost of {costs.tokens} tokens", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    rows = (
        ("cache", f"{costs.cache_bytes:,} bytes", f"keys {costs.key_bytes:,}, values {costs.value_bytes:,}"),
        ("in a pool", f"{costs.allocated_bytes:,} bytes", f"{costs.block_count} blocks of each layer"),
        ("handoff payload", f"{costs.handoff_bytes:,} bytes", "whole blocks that the next token can reach"),
        (
            "rephasing",
            f"{costs.rephase_lanes:,} lanes",
            "repairs coordinates, not history",
        ),
        (
            "prefill attention",
            f"{costs.attention_multiplies:,} multiplications",
            f"{costs.attention_pairs:,} pairs, for one query head per KV head",
        ),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
