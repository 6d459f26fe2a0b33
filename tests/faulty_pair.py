"""Both roles over real engines with a scripted road between them, and a landing that a test can hold open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_worker.landing import CacheLanding
from kvpact.cli.pair import InProcessPair
from kvpact.contract.contract import Contract
from kvpact.engine.engine import Engine
from kvpact.handoff.landing import LandingHandle
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms
from kvpact.types import BlockId, HandoffId, Sampling, Verdict
from prefill_worker.partners import OwnedPort
from tests.handoff_faults import FaultyPort, Script


class FaultyPair(InProcessPair):
    """An InProcessPair whose messages pass a script."""

    def __init__(self, writer: Engine, reader: Engine, script: Script, **options: Any) -> None:
        self._script = script
        super().__init__(writer, reader, **options)

    def _port(self, *arguments: Any) -> OwnedPort:
        return FaultyPort(super()._port(*arguments), self._script)

    async def answer(self, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
        """All tokens of a request."""
        return tuple([token.token_id async for token in self.generate(prompt, sampling)])


@dataclass(slots=True)
class GatedLanding:
    """A CacheLanding whose threads wait at a gate before they write."""

    inner: CacheLanding
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    blocks: dict[HandoffId, tuple[BlockId, ...]] = field(default_factory=dict)

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        **options: Any,
    ) -> LandingHandle:
        """See Landing."""
        self.blocks[terms.handoff_id] = tuple(blocks)
        return GatedHandle(self.inner.prepare(writer, verdict, terms, blocks, **options), self)


@dataclass(slots=True)
class GatedHandle:
    """See LandingHandle."""

    inner: LandingHandle
    landing: GatedLanding
    brief: bool = False

    @property
    def max_abs_error(self) -> float | None:
        """See LandingHandle."""
        return self.inner.max_abs_error

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """See LandingHandle."""
        self.landing.entered.set()
        assert self.landing.gate.wait(10)
        self.inner.land(header, keys, values)

    def finish(self, prompt_tokens: int) -> None:
        """See LandingHandle."""
        self.inner.finish(prompt_tokens)
