"""A captured handoff as tables for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from kvpact.cli.contract_tables import print_contract, print_verdict
from kvpact.cli.handoff_facts import HandoffFacts
from kvpact.cli.ledger_table import print_ledger
from kvpact.cli.output import console
from kvpact.handoff.messages import HandoffTerms, Witness


def print_facts(file: str, facts: HandoffFacts) -> None:
    """What the file holds, then contract, verdict, terms, costs, witnesses and chunks."""
    headline = f"[bold]{escape(file)}[/bold]: {escape(facts.outcome())}"
    console.print(headline, highlight=False, soft_wrap=True)
    if not facts.digest_holds:
        console.print("[red]the contract isn't the one that its digest names[/red]")
    _heading("contract of the writer")
    print_contract(facts.writer)
    _heading("verdict")
    print_verdict(facts.verdict)
    if facts.terms is not None:
        _print_terms(facts.terms)
    if facts.costs is not None:
        console.print()
        print_ledger(facts.costs)
    commit = facts.capture.commit()
    if commit is not None:
        _print_witnesses(commit.witnesses)
    _print_chunks(facts)


def _heading(text: str) -> None:
    console.print(f"\n[bold underline]{text}[/bold underline]")


def _print_terms(terms: HandoffTerms) -> None:
    runs = ", ".join(f"[{run.start}, {run.start + run.count})" for run in terms.positions)
    text = (
        f"\nhandoff {terms.handoff_id.hex()}: {len(terms.token_ids)} prompt tokens at positions {runs}, "
        f"next position {terms.next_position}, tables for {terms.table_length} tokens"
    )
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_witnesses(witnesses: tuple[Witness, ...]) -> None:
    if not witnesses:
        console.print("\nwitnesses: none")
        return
    by_layer: dict[int, list[int]] = {}
    for witness in witnesses:
        by_layer.setdefault(witness.layer, []).append(witness.position)
    table = Table("layer", "positions", title="witnesses", title_justify="left")
    for layer, positions in sorted(by_layer.items()):
        table.add_row(str(layer), ", ".join(str(position) for position in sorted(positions)))
    console.print()
    console.print(table, highlight=False)


def _print_chunks(facts: HandoffFacts) -> None:
    chunks = facts.capture.chunks()
    if not chunks:
        return
    table = Table(title="chunks", title_justify="left")
    for name in ("sequence", "layer", "blocks", "key bytes", "value bytes", "checksum"):
        table.add_column(name, justify="right")
    for chunk in chunks:
        header, holds = chunk.header, facts.checksum_holds(chunk)
        stop = header.block_start + header.block_count
        table.add_row(
            str(header.sequence),
            str(header.layer),
            f"{header.block_start}-{stop - 1}",
            f"{header.key_bytes:,}",
            f"{header.value_bytes:,}",
            f"{chunk.checksum:016x}" if holds else f"[red]{chunk.checksum:016x} doesn't hold[/red]",
        )
    console.print()
    console.print(table, highlight=False)
