"""A whole decode worker: engine, receiver, decoder, and what others see of it."""

from __future__ import annotations

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
from kvpact.handoff.capture_port import capturing
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.landing import Landing
from kvpact.handoff.malloc import tune_malloc
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.security_transport import make_security
from kvpact.handoff.transport_settings import make_reader_transports
from kvpact.handoff.trust import TakenOnTrust
from kvpact.serving.description import describe_worker
from kvpact.serving.engine_factory import load_engine
from kvpact.serving.worker_transport import WorkerFront
from kvpact.tls import PeerRole
from kvpact.types import ContractDigest, HandoffId, Role, Verdict, WorkerCounters, WorkerLife

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

    Without `checked` it takes handoffs on trust: for laboratory runs that look at damage themselves. Then,
    through a `landing` of the caller's, and where handoffs are captured, each prompt goes as a whole.
    """
    whole = not checked or landing is not None or handoff.capture is not None
    return Receiver(
        life=life,
        contract=engine.contract,
        policy=Policy(on_convertible=handoff.on_convertible, lossy=handoff.lossy),
        pool=engine.pool,
        landing=landing or CacheLanding(engine.cache),
        verifier=CacheVerifier(engine.cache) if checked else TakenOnTrust(),
        judge=EngineJudge(engine) if checked else None,
        clock=MonotonicClock(),
        limits=ReceiverLimits(
            lease_s=handoff.lease_s,
            chunk_cap_bytes=handoff.chunk_cap_bytes,
            reuse_prefixes=engine.reuses_prefixes and not whole,
        ),
        executor=executor,
        transports=make_reader_transports(handoff, life),
    )


class DecodeWorker:
    """Serves from `start` to `stop`; answers WorkerService for itself."""

    def __init__(self, config: Config, engine: Engine, *, worker: str, coordinator: str | None) -> None:
        security = make_security(config.tls, PeerRole.DECODE)
        self._engine = engine
        self._life = WorkerLife(worker=worker, incarnation=new_incarnation())
        self._executor = ThreadPoolExecutor(LANDING_THREADS, thread_name_prefix="kvpact-landing")
        self._receiver = make_receiver(engine, config.handoff, self._life, self._executor)
        self._capturing = capturing(self._receiver, config.handoff, worker)
        self._reader: ReaderPort = self._capturing or self._receiver
        self._decoder = Decoder(engine, self._receiver, self._life)
        self._front = WorkerFront(
            facts=self,
            role=config.decode,
            add_service=lambda server: add_decode_service(server, self._reader, self._decoder),
            coordinator=coordinator,
            security=security,
        )
        self._draining = False

    async def start(self) -> str:
        """Computes, serves and registers; the advertised host:port. Raises Unavailable."""
        self._engine.start()
        return await self._front.start()

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends serving, then every handoff and sequence; `at_once`: computing first, so that calls fail."""
        if at_once:
            self._engine.close()
        await self._front.stop()
        self._receiver.close()
        if self._capturing is not None:
            await self._capturing.close()
        self._engine.close()
        self._executor.shutdown()

    def alive(self) -> bool:
        """Whether it still computes."""
        return self._engine.alive()

    def description(self) -> WorkerDescription:
        """Life, contract, counters and load now."""
        handoffs = self._receiver.counters()
        running, waiting = self._engine.load_now()
        return describe_worker(
            self._engine,
            life=self._life,
            role=Role.DECODE,
            running_requests=running,
            waiting_requests=waiting + self._receiver.held(),
            draining=self._draining,
            handoffs=WorkerCounters(
                committed_handoffs=handoffs.committed,
                failed_handoffs=handoffs.failed,
                handoff_bytes=handoffs.landed_bytes,
                prefix_query_tokens=handoffs.prefix_query_tokens,
                prefix_hit_tokens=handoffs.prefix_hit_tokens,
            ),
            quarantined_staging_bytes=self._receiver.quarantined_bytes(),
        )

    async def describe(self) -> WorkerDescription:
        """See WorkerFacts."""
        return self.description()

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See WorkerFacts."""
        return await self._receiver.renew(handoff_id, life)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See WorkerFacts; ends decoding as well."""
        state = await self._reader.release(handoff_id, reason, writer_stopped=writer_stopped)
        self._decoder.give_up(handoff_id)
        return state

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """See WorkerFacts."""
        return self._receiver.verdict(writer_digest, reader_digest)

    async def drain(self) -> int:
        """See WorkerFacts."""
        await self._front.leave()
        self._receiver.drain()
        self._decoder.drain()
        if not self._draining:
            self._draining = True
            await self._front.announce()
        return sum(self._engine.load_now()) + self._receiver.held()
