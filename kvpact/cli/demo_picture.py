"""The demo as a picture: two processes, what one says to the other's cache, and what crossed between them."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.generation import Answer
from kvpact.cli.refusal import picture_refusal
from kvpact.handoff.messages import WorkerDescription
from kvpact.types import Exactness, PlanStep, Verdict, VerdictWord

STYLES = {VerdictWord.ACCEPT: "green", VerdictWord.CONVERT: "yellow", VerdictWord.REJECT: "red"}
ARROWS = {
    VerdictWord.ACCEPT: "── accepted ──▶",
    VerdictWord.CONVERT: "── converted ──▶",
    VerdictWord.REJECT: "── refused ──✗",
}


def picture_pair(prefill: WorkerDescription, decode: WorkerDescription, verdict: Verdict) -> RenderableType:
    """Both sides with the verdict between them, and each refusing difference below."""
    grid = Table.grid(expand=False, padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="center", vertical="middle")
    grid.add_column()
    middle = Text(ARROWS[verdict.word], style=STYLES[verdict.word])
    for step in verdict.plan:
        middle.append(f"\n{_step(step)}", style="dim")
    grid.add_row(_side("prefill (writer)", prefill), middle, _side("decode (reader)", decode))
    return Group(grid, picture_refusal(verdict))


def picture_answer(prompt: str, answer: Answer) -> RenderableType:
    """A question, its answer, and what the handoff cost."""
    alone = "nothing was handed over: the decode worker computed the prompt"
    cost = "one token needs no handoff" if len(answer.token_ids) <= 1 else alone
    if answer.handoff_bytes is not None and answer.handoff_s is not None:
        cost = f"{answer.handoff_bytes:,} bytes handed over in {answer.handoff_s * 1000:.1f} ms"
    if answer.max_abs_error is not None:
        cost += f", numbers off by up to {answer.max_abs_error:.2g}"
    tokens = len(answer.token_ids)
    line = f"{cost}; first token after {answer.ttft_s * 1000:.0f} ms, {tokens} token{'s' * (tokens != 1)}"
    return Group(
        Text(prompt, style="bold"),
        Padding(Text(answer.text.strip()), (0, 0, 0, 2)),
        Text(f"  {line}", style="dim"),
    )


def _side(title: str, worker: WorkerDescription) -> Panel:
    layout, rotary = worker.contract.layout, worker.contract.layer_groups[0].rotary
    facts = (
        f"pid {worker.pid}",
        f"keys {rotary.key_state}, {layout.key_dtype}",
        f"{layout.axis_order}, block {layout.block_size}",
        f"{worker.load.blocks.free}/{worker.load.blocks.total} blocks free",
    )
    return Panel(Text("\n".join(facts)), title=title, title_align="left", expand=False)


def _step(step: PlanStep) -> str:
    if step.exactness is Exactness.ROUNDING and step.bound_epsilons is not None:
        return f"{step.op}: ± {step.bound_epsilons:g} epsilons"
    return f"{step.op}: {str(step.exactness).replace('_', ' ')}"
