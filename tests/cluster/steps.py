"""What a coordinator does with workers, one step at a time: hands a prompt over, decodes it later."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.grpc_transport import GrpcTransport
from kvpact.clock import new_handoff_id
from kvpact.handoff.jobs import Committed, DecodeJob, FirstToken, Partner, PrefillEvent, PrefillJob
from kvpact.types import Sampling, WorkerLife
from tests.cluster.clusters import UpCluster

OUTPUT_TOKENS = 9
SAMPLING = Sampling(max_output_tokens=OUTPUT_TOKENS, ignore_eos=True)


def hand_over(
    cluster: UpCluster, decode: str, prompt: tuple[int, ...], prefill: str = "prefill-0"
) -> tuple[int, DecodeJob]:
    """Lets a prefill worker compute a prompt for a decode worker: the first token, and how to go on.

    Raises what the prefill worker raises.
    """
    workers = cluster.workers()
    writer, reader = workers[prefill], workers[decode]
    handoff_id, table_length = new_handoff_id(), len(prompt) + OUTPUT_TOKENS
    job = PrefillJob(
        handoff_id=handoff_id,
        prefill=_life(writer),
        decode=Partner(life=_life(reader), endpoint=reader["endpoint"]),
        token_ids=prompt,
        original_prompt_tokens=len(prompt),
        table_length=table_length,
        sampling=SAMPLING,
        request_id="by-hand",
    )
    *_, kept, first = asyncio.run(_prefill(writer["endpoint"], job))
    assert isinstance(kept, Committed)
    assert isinstance(first, FirstToken)
    return first.token_id, DecodeJob(
        handoff_id=handoff_id,
        decode=_life(reader),
        token_ids=(*prompt, first.token_id),
        original_prompt_tokens=len(prompt),
        sampling=SAMPLING,
        request_id="by-hand",
    )


def decode(endpoint: str, job: DecodeJob) -> tuple[int, ...]:
    """The tokens after the first one. Raises what the decode worker raises."""
    return asyncio.run(_decode(endpoint, job))


async def _prefill(endpoint: str, job: PrefillJob) -> list[PrefillEvent]:
    port = GrpcTransport().prefill_port(endpoint)
    try:
        return [event async for event in port.prefill(job)]
    finally:
        await port.close()


async def _decode(endpoint: str, job: DecodeJob) -> tuple[int, ...]:
    port = GrpcTransport().decode_port(endpoint)
    try:
        return tuple([token async for part in port.decode(job) for token in part.token_ids])
    finally:
        await port.close()


def _life(worker: dict[str, Any]) -> WorkerLife:
    return WorkerLife(worker=worker["worker"], incarnation=bytes.fromhex(worker["incarnation"]))
