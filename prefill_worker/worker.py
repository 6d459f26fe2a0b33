"""A whole prefill worker: engine, prefiller, and what others see of it."""

from __future__ import annotations

from kvpact.clock import MonotonicClock, new_handoff_id, new_incarnation
from kvpact.config import Config
from kvpact.engine.engine import Engine
from kvpact.errors import BadRequest, UnknownHandoff
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.malloc import tune_malloc
from kvpact.handoff.messages import HandoffState, WorkerDescription
from kvpact.handoff.security_transport import make_security
from kvpact.handoff.transport_settings import make_writer_transports
from kvpact.serving.description import describe_worker
from kvpact.serving.engine_factory import load_engine
from kvpact.serving.worker_transport import WorkerFront
from kvpact.tls import PeerRole
from kvpact.types import ContractDigest, HandoffId, Role, Verdict, WorkerCounters, WorkerLife
from prefill_worker.canary import Canary
from prefill_worker.partners import Partners
from prefill_worker.prefiller import Prefiller
from prefill_worker.service import add_prefill_service


def build_prefill_worker(config: Config, *, worker: str, coordinator: str | None) -> PrefillWorker:
    """Loads the engine and wires a worker named `worker`. Raises what `load_engine` raises."""
    tune_malloc()
    return PrefillWorker(config, load_engine(config, config.prefill), worker=worker, coordinator=coordinator)


class PrefillWorker:
    """Serves from `start` to `stop`; answers WorkerService for itself."""

    def __init__(self, config: Config, engine: Engine, *, worker: str, coordinator: str | None) -> None:
        security = make_security(config.tls, PeerRole.PREFILL)
        self._engine = engine
        self._life = WorkerLife(worker=worker, incarnation=new_incarnation())
        self._partners = Partners(
            life=self._life,
            contract=engine.contract,
            clock=MonotonicClock(),
            open_port=lambda partner: GrpcReaderPort(partner.endpoint, partner.life, security=security),
            probe=Canary(engine, self._life, new_handoff_id),
            transports=make_writer_transports(config.handoff, self._life, encrypted=security.encrypted),
        )
        self._prefiller = Prefiller(
            engine=engine, life=self._life, partners=self._partners, slots=config.engine.max_sequences
        )
        self._front = WorkerFront(
            facts=self,
            role=config.prefill,
            add_service=lambda server: add_prefill_service(server, self._prefiller, self._partners),
            coordinator=coordinator,
            security=security,
        )

    async def start(self) -> str:
        """Computes, serves and registers; the advertised host:port. Raises Unavailable."""
        self._engine.start()
        return await self._front.start()

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends serving, then handoffs and computations; `at_once`: computing first, so that calls fail."""
        if at_once:
            self._engine.close()
        await self._front.stop()
        await self._partners.close()
        self._engine.close()

    def alive(self) -> bool:
        """Whether it still computes."""
        return self._engine.alive()

    def description(self) -> WorkerDescription:
        """Life, contract, counters and load now."""
        tally = self._prefiller.tally()
        running, waiting = self._engine.load_now()
        return describe_worker(
            self._engine,
            life=self._life,
            role=Role.PREFILL,
            running_requests=running,
            waiting_requests=max(waiting, self._prefiller.jobs() - running),
            draining=self._prefiller.draining,
            handoffs=WorkerCounters(
                committed_handoffs=tally.committed,
                failed_handoffs=tally.failed,
                handoff_bytes=tally.payload_bytes,
            ),
            quarantined_staging_bytes=self._partners.quarantined_bytes(),
        )

    async def describe(self) -> WorkerDescription:
        """See WorkerFacts."""
        return self.description()

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """A prefill worker holds no leases: a handoff lives as long as its Prefill call."""
        raise UnknownHandoff(
            f"handoff {handoff_id.hex()} has no lease on a prefill worker; renew it on its decode worker",
            handoff_id=handoff_id,
        )

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See WorkerFacts; ends the computation."""
        return HandoffState.RESERVED if self._prefiller.give_up(handoff_id) else None

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """See WorkerFacts."""
        verdict = self._partners.verdict(writer_digest, reader_digest)
        if verdict is None:
            raise BadRequest("no pairing of these two contracts is known here", param="writer_digest")
        return verdict

    async def drain(self) -> int:
        """See WorkerFacts."""
        await self._front.leave()
        is_news = not self._prefiller.draining
        self._prefiller.drain()
        if is_news:
            await self._front.announce()
        return self._prefiller.jobs()
