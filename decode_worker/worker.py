"""A whole decode worker: engine, receiver, decoder, and what others see of it."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ThreadPoolExecutor

from decode_worker.canary import EngineJudge
from decode_worker.decoder import Decoder
from decode_worker.landing import CacheLanding
from decode_worker.service import add_decode_service
from decode_worker.verifier import CacheVerifier
from kvpact.clock import MonotonicClock, new_incarnation
from kvpact.config import Config, HandoffConfig
from kvpact.contract.compare import Policy
from kvpact.contract.convert_fast import warm_up
from kvpact.engine.engine import Engine
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.landing import Landing
from kvpact.handoff.malloc import tune_malloc
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.trust import TakenOnTrust
from kvpact.serving.engine_factory import load_engine
from kvpact.serving.worker_transport import WorkerFront
from kvpact.types import ContractDigest, HandoffId, Role, Verdict, WorkerCounters, WorkerLife, WorkerLoad

LANDING_THREADS = 2


def build_decode_worker(config: Config, *, worker: str, coordinator: str | None) -> DecodeWorker:
    """Loads the engine and wires a worker named `worker`. Raises what `load_engine` raises."""
    tune_malloc()
    warm_up()
    return DecodeWorker(config, load_engine(config, config.decode), worker=worker, coordinator=coordinator)


def make_receiver(
    engine: Engine,
    handoff: HandoffConfig,
    life: WorkerLife,
    executor: Executor,
    landing: Landing | None = None,
    *,
    checked: bool = True,
) -> Receiver:
    """A receiver that lands into the cache of `engine`, with the policy and limits of a deployment.

    Without `checked` it takes handoffs on trust: for laboratory runs that look at damage themselves.
    """
    return Receiver(
        life=life,
        contract=engine.contract,
        policy=Policy(on_convertible=handoff.on_convertible, lossy=handoff.lossy),
        pool=engine.pool,
        landing=landing or CacheLanding(engine.cache),
        verifier=CacheVerifier(engine.cache) if checked else TakenOnTrust(),
        judge=EngineJudge(engine) if checked else None,
        clock=MonotonicClock(),
        limits=ReceiverLimits(lease_s=handoff.lease_s, chunk_cap_bytes=handoff.chunk_cap_bytes),
        executor=executor,
    )


class DecodeWorker:
    """Serves from `start` to `stop`; answers WorkerService for itself."""

    def __init__(self, config: Config, engine: Engine, *, worker: str, coordinator: str | None) -> None:
        self._engine = engine
        self._life = WorkerLife(worker=worker, incarnation=new_incarnation())
        self._executor = ThreadPoolExecutor(LANDING_THREADS, thread_name_prefix="kvpact-landing")
        self._receiver = make_receiver(engine, config.handoff, self._life, self._executor)
        self._decoder = Decoder(engine, self._receiver)
        self._front = WorkerFront(
            facts=self,
            role=config.decode,
            add_service=lambda server: add_decode_service(server, self._receiver, self._decoder),
            coordinator=coordinator,
        )
        self._draining = False

    async def start(self) -> str:
        """Computes, serves and registers; the advertised host:port. Raises Unavailable."""
        self._engine.start()
        return await self._front.start()

    async def stop(self) -> None:
        """Ends serving, then every handoff and sequence."""
        await self._front.stop()
        self._receiver.close()
        self._engine.close()
        self._executor.shutdown()

    def alive(self) -> bool:
        """Whether it still computes."""
        return self._engine.alive()

    def description(self) -> WorkerDescription:
        """Life, contract, counters and load now."""
        computed, handoffs = self._engine.counters(), self._receiver.counters()
        running, waiting = self._engine.load_now()
        return WorkerDescription(
            life=self._life,
            role=Role.DECODE,
            contract=self._engine.contract,
            counters=WorkerCounters(
                computed_prompt_tokens=computed.computed_prompt_tokens,
                computed_output_tokens=computed.computed_output_tokens,
                forward_steps=computed.forward_steps,
                committed_handoffs=handoffs.committed,
                failed_handoffs=handoffs.failed,
                handoff_bytes=handoffs.landed_bytes,
            ),
            load=WorkerLoad(
                running_requests=running,
                waiting_requests=waiting + self._receiver.held(),
                blocks=self._engine.pool.counts(),
                draining=self._draining,
            ),
            pid=os.getpid(),
        )

    async def describe(self) -> WorkerDescription:
        """See WorkerFacts."""
        return self.description()

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See WorkerFacts."""
        return await self._receiver.renew(handoff_id, life)

    async def release(self, handoff_id: HandoffId, reason: str) -> HandoffState | None:
        """See WorkerFacts; ends decoding as well."""
        state = await self._receiver.release(handoff_id, reason)
        self._decoder.give_up(handoff_id)
        return state

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """See WorkerFacts."""
        return self._receiver.verdict(writer_digest, reader_digest)

    async def drain(self) -> int:
        """See WorkerFacts."""
        self._draining = True
        self._receiver.drain()
        return sum(self._engine.load_now()) + self._receiver.held()
