"""Prefill and decode in one process, joined by the in-process transport: the handoff leg of parity."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from decode_worker.decoder import Decoder
from decode_worker.worker import make_receiver
from kvpact.clock import MonotonicClock, new_handoff_id, new_incarnation
from kvpact.config import HandoffConfig
from kvpact.engine.engine import Engine
from kvpact.handoff.capture_recorder import OnCapture, RecordingReaderPort
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.jobs import Committed, DecodeJob, FirstToken, Partner, PrefillJob
from kvpact.handoff.landing import Landing
from kvpact.handoff.messages import CanaryOutcome
from kvpact.types import FinishReason, HandoffId, Sampling, Verdict, WorkerLife
from prefill_worker.canary import Canary
from prefill_worker.partners import OwnedPort, Partners
from prefill_worker.prefiller import Prefiller

NO_ENDPOINT = "in-process"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairToken:
    """One output token of a pair. `logits` [vocabulary] of decoded tokens where they were asked for."""

    token_id: int
    finish_reason: FinishReason | None
    logits: Any = None
    committed: Committed | None = None
    """Set on the first token of a sequence that was handed over."""


class InProcessPair:
    """Both roles' own code over two engines that the caller owns and has started."""

    def __init__(
        self,
        writer: Engine,
        reader: Engine,
        *,
        handoff: HandoffConfig | None = None,
        landing: Landing | None = None,
        checked: bool = True,
        on_capture: OnCapture | None = None,
    ) -> None:
        """`checked` False, or a `landing` of the caller's: no canary runs and witnesses aren't looked at.

        `on_capture` gets each handoff as it went over the port, the pair's probe included.
        """
        clock = MonotonicClock()
        checked = checked and landing is None
        self._writer_life = WorkerLife(worker="prefill-0", incarnation=new_incarnation())
        self._partner = Partner(
            life=WorkerLife(worker="decode-0", incarnation=new_incarnation()), endpoint=NO_ENDPOINT
        )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvpact-landing")
        self.receiver = make_receiver(
            reader, handoff or HandoffConfig(), self._partner.life, self._executor, landing, checked=checked
        )
        self._partners = Partners(
            life=self._writer_life,
            contract=writer.contract,
            clock=clock,
            open_port=lambda _: self._port(on_capture),
            probe=Canary(writer, self._writer_life, new_handoff_id) if checked else None,
        )
        self.prefiller = Prefiller(engine=writer, life=self._writer_life, partners=self._partners, slots=8)
        self.decoder = Decoder(reader, self.receiver, self._partner.life)
        self.canary: CanaryOutcome | None = None

    async def __aenter__(self) -> InProcessPair:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._partners.close()
        self.receiver.close()
        self._executor.shutdown()

    def _port(self, on_capture: OnCapture | None) -> OwnedPort:
        port = InProcessReaderPort(self.receiver)
        return port if on_capture is None else RecordingReaderPort(port, on_capture)

    async def connect(self) -> Verdict:
        """What the reader says to the writer's cache; `canary` tells how the pair's probe went."""
        paired = await self._partners.connect(self._partner)
        assert paired.verdict is not None, "connect gives a verdict or raises"
        self.canary = paired.canary
        return paired.verdict

    async def generate(
        self, prompt: tuple[int, ...], sampling: Sampling, **options: Any
    ) -> AsyncGenerator[PairToken, None]:
        """The first token from the writer, the others from the reader; `options` go into its SequenceRequest.

        Raises:
            KvpactError: whatever either side refuses or fails with.
        """
        handoff_id = new_handoff_id()
        first = await self._first_token(self.prefill_job(handoff_id, prompt, sampling))
        yield first
        if first.finish_reason is not None:
            return
        order = self.decode_job(handoff_id, (*prompt, first.token_id), len(prompt), sampling)
        async with contextlib.aclosing(self.decoder.tokens(order, **options)) as tokens:
            async for token in tokens:
                yield PairToken(
                    token_id=token.token_id, finish_reason=token.finish_reason, logits=token.logits
                )

    def prefill_job(self, handoff_id: HandoffId, prompt: tuple[int, ...], sampling: Sampling) -> PrefillJob:
        """The order to compute `prompt` and hand it over."""
        return PrefillJob(
            handoff_id=handoff_id,
            prefill=self._writer_life,
            decode=self._partner,
            token_ids=prompt,
            original_prompt_tokens=len(prompt),
            table_length=len(prompt) + sampling.max_output_tokens,
            sampling=sampling,
            request_id=handoff_id.hex(),
        )

    def decode_job(
        self, handoff_id: HandoffId, token_ids: tuple[int, ...], prompt_tokens: int, sampling: Sampling
    ) -> DecodeJob:
        """The order to decode a committed handoff; `token_ids` are the prompt and the first token."""
        return DecodeJob(
            handoff_id=handoff_id,
            decode=self._partner.life,
            token_ids=token_ids,
            sampling=sampling,
            original_prompt_tokens=prompt_tokens,
            request_id=handoff_id.hex(),
        )

    async def _first_token(self, job: PrefillJob) -> PairToken:
        committed: Committed | None = None
        async with contextlib.aclosing(self.prefiller.prefill(job)) as events:
            async for event in events:
                if isinstance(event, Committed):
                    committed = event
                elif isinstance(event, FirstToken):
                    return PairToken(
                        token_id=event.token_id, finish_reason=event.finish_reason, committed=committed
                    )
        raise AssertionError("a prefill ends with its first token or an error")
