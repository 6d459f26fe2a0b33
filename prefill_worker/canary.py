"""Probes a new pair as its writer: a handoff of fixed tokens per reachable table, which the reader judges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kvpact.contract.canary import probe_lengths, probe_positions, probe_tokens
from kvpact.contract.contract import Contract
from kvpact.engine.engine import Engine
from kvpact.engine.requests import SequenceRequest
from kvpact.errors import DataLoss
from kvpact.handoff.messages import CanaryOutcome, HandoffTerms
from kvpact.handoff.sender import Sender
from kvpact.handoff.terms import make_terms, positions_of
from kvpact.types import HandoffId, Sampling, WorkerLife
from prefill_worker.computation import Computation

SAMPLING = Sampling(max_output_tokens=2, ignore_eos=True)


class Canary:
    """Probes pairs with the writer's real engine, through the same path as a prompt."""

    def __init__(self, engine: Engine, life: WorkerLife, new_handoff_id: Callable[[], HandoffId]) -> None:
        self._engine = engine
        self._life = life
        self._new_handoff_id = new_handoff_id

    async def run(self, sender: Sender, reader: WorkerLife, contract: Contract) -> CanaryOutcome | None:
        """The first probe that fails, else the one that came closest to failing; None where none fits.

        Args:
            contract: the reader's.

        Raises:
            KvpactError: the reader can't be reached, has no room, or an engine failed.
        """
        worst: CanaryOutcome | None = None
        for length in probe_lengths(self._engine.contract, contract):
            outcome = await self._probe(sender, self._terms(sender, reader, contract, length))
            if worst is None or _closeness(outcome) > _closeness(worst):
                worst = outcome
            if not outcome.passed:
                return outcome
        return worst

    def _terms(self, sender: Sender, reader: WorkerLife, contract: Contract, length: int) -> HandoffTerms:
        positions = probe_positions(self._engine.contract, contract, length)
        return make_terms(
            handoff_id=self._new_handoff_id(),
            writer=self._life,
            reader=reader,
            contract=self._engine.contract,
            contract_digest=sender.digest,
            token_ids=probe_tokens(len(positions), self._engine.model.vocab_size),
            table_length=length,
            positions=positions,
            canary=True,
        )

    async def _probe(self, sender: Sender, terms: HandoffTerms) -> CanaryOutcome:
        try:
            async with sender.reserved(terms, SAMPLING.max_output_tokens) as handoff:
                request = replace(_request(terms), witness_places=handoff.places_to_show())
                async with Computation(self._engine, terms.handoff_id, request) as computation:
                    _, sent = await computation.send(handoff)
        except DataLoss as error:
            return CanaryOutcome(passed=False, max_abs_error=math.inf, tolerance=0.0, finding=str(error))
        assert sent is not None, "end tokens are ignored and there is room for one more token"
        outcome = sent.receipt.canary
        if outcome is None:
            raise DataLoss("the reader took the pair's probe and said nothing of it", check="canary")
        return outcome


def _request(terms: HandoffTerms) -> SequenceRequest:
    return SequenceRequest(
        token_ids=terms.token_ids,
        positions=positions_of(terms.positions),
        sampling=SAMPLING,
        table_length=terms.table_length,
        stop_after_first=True,
        hold_blocks=True,
        counted=False,
    )


def _closeness(outcome: CanaryOutcome) -> float:
    """Error in units of its tolerance."""
    return outcome.max_abs_error / outcome.tolerance if outcome.tolerance else math.inf
