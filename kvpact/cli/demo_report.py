"""One prompt of the demo: what was asked, what crossed the process boundary and what came back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.coordinator import Coordinator
from coordinator.generation import Answer
from kvpact.cli.demo_picture import picture_answer, picture_pair
from kvpact.cli.output import console, show
from kvpact.contract.jsonform import verdict_to_json
from kvpact.errors import NoCompatiblePair
from kvpact.handoff.messages import WorkerDescription
from kvpact.types import Role, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """All that is known of one prompt; `answer` is None where the handoff was refused."""

    prompt: str
    verdict: Verdict
    answer: Answer | None
    prefill: WorkerDescription
    decode: WorkerDescription

    @property
    def refused(self) -> bool:
        """Whether no handoff was allowed."""
        return self.answer is None

    def to_json(self) -> dict[str, Any]:
        """The object of `kvpact demo --json`; what wasn't reached is null."""
        verdict = verdict_to_json(self.verdict)
        answer, prefill, decode = self.answer, self.prefill, self.decode
        return {
            "text": answer.text if answer else None,
            "token_ids": list(answer.token_ids) if answer else None,
            "prefill_pid": prefill.pid,
            "decode_pid": decode.pid,
            "prefill_computed_tokens": prefill.counters.computed_prompt_tokens,
            "decode_computed_tokens": decode.counters.computed_output_tokens,
            "verdict": verdict["verdict"],
            "differences": verdict["differences"],
            "plan": verdict["plan"],
            "handoff_bytes": answer.handoff_bytes if answer else None,
            "ttft_s": answer.ttft_s if answer else None,
            "handoff_s": answer.handoff_s if answer else None,
            "max_abs_error": answer.max_abs_error if answer else None,
            "blocks": {
                "prefill": _blocks(prefill),
                "decode": _blocks(decode),
            },
        }


async def ask(coordinator: Coordinator, prompt: str, max_tokens: int) -> DemoReport:
    """Asks one chat question and reads both workers' own counters afterwards."""
    answer: Answer | None
    try:
        answer = await coordinator.chat(prompt, max_tokens=max_tokens)
    except NoCompatiblePair as error:
        if error.verdict is None:
            raise
        answer = None
    workers = await coordinator.describe()
    prefill = next(worker for worker in workers if worker.role is Role.PREFILL)
    decode = next(worker for worker in workers if worker.role is Role.DECODE)
    verdict = coordinator.verdict(prefill.life, decode.life)
    return DemoReport(prompt=prompt, verdict=verdict, answer=answer, prefill=prefill, decode=decode)


def print_pair(report: DemoReport) -> None:
    """Both sides and the verdict between them, once for all prompts."""
    show(picture_pair(report.prefill, report.decode, report.verdict))


def print_answer(report: DemoReport) -> None:
    """What one prompt gave."""
    if report.answer is not None:
        show(picture_answer(report.prompt, report.answer))
        return
    computed = report.prefill.counters.computed_prompt_tokens
    console.print(
        f"no request is served; {computed} prompt tokens were computed", style="red", highlight=False
    )


def _blocks(worker: WorkerDescription) -> dict[str, int]:
    return {"free": worker.load.blocks.free, "total": worker.load.blocks.total}
