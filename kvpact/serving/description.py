"""What a worker says of itself: what its engine computed and holds, and what its handoffs came to."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpact.handoff.messages import WorkerDescription
from kvpact.types import Role, WorkerCounters, WorkerLife, WorkerLoad

if TYPE_CHECKING:
    from kvpact.engine.engine import Engine


def describe_worker(
    engine: Engine,
    *,
    life: WorkerLife,
    role: Role,
    running_requests: int,
    waiting_requests: int,
    draining: bool,
    handoffs: WorkerCounters,
    quarantined_staging_bytes: int = 0,
) -> WorkerDescription:
    """Life, contract, counters and load of this process now.

    `handoffs`: what handoffs alone came to, prefix tokens that Reserve looked up included; the engine's own
    work is added.
    """
    computed = engine.counters()
    return WorkerDescription(
        life=life,
        role=role,
        contract=engine.contract,
        counters=replace(
            handoffs,
            computed_prompt_tokens=computed.computed_prompt_tokens,
            computed_output_tokens=computed.computed_output_tokens,
            forward_steps=computed.forward_steps,
            prefix_query_tokens=computed.prefix_query_tokens + handoffs.prefix_query_tokens,
            prefix_hit_tokens=computed.prefix_hit_tokens + handoffs.prefix_hit_tokens,
        ),
        load=WorkerLoad(
            running_requests=running_requests,
            waiting_requests=waiting_requests,
            blocks=engine.pool.counts(),
            draining=draining,
            quarantined_staging_bytes=quarantined_staging_bytes,
        ),
        pid=os.getpid(),
    )
