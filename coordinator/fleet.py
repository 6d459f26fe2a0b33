"""Keeps the registry true: pairs workers, tries again after failures, forgets silent ones, owns ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from coordinator.ports import DecodePort, PrefillPort, RegisteredWorker, Transport, WorkerPort
from coordinator.registry import NO_WORK, PairKey, Registry, Snapshot
from coordinator.router import obstacle_of, refusing_fields
from kvpact.clock import Clock
from kvpact.contract.explain import render_verdict
from kvpact.errors import ContractRefused, DataLoss, Exhausted, KvpactError, Unavailable
from kvpact.handoff.jobs import Paired
from kvpact.handoff.messages import CanaryOutcome
from kvpact.metrics import Metrics
from kvpact.types import Role, VerdictWord, WorkerCounters, WorkerLife, WorkerLoad

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
SILENCE_S = 5.0
"""A worker that says nothing for this long is gone."""
SETTLING_S = 30.0
"""After workers came or went, a request waits up to this long for a pair before it is turned away."""
MOST_WORKERS = 1024
QUARANTINE_S = 30.0
"""A pair whose data failed a check is paired anew after this long; with another life of either, at once."""


def pairing_delay_s(failures: int) -> float:
    """Seconds before the next try after `failures` >= 1 failed ones."""
    return float(min(0.1 * 2 ** min(failures - 1, 7), 10.0))


class Fleet:
    """Runs on one event loop between `start` and `stop`."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        metrics: Metrics,
        *,
        delay_s: Callable[[int], float] = pairing_delay_s,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._metrics = metrics
        self._delay_s = delay_s
        self._registry = Registry()
        self._ports: dict[WorkerLife, WorkerPort] = {}
        self._pairing: dict[PairKey, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._last_change_s: float | None = None
        self._timer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch for silence."""
        self._timer = asyncio.create_task(self._watch(), name="fleet-watch")

    async def stop(self) -> None:
        """Ends every task and port. Idempotent."""
        tasks = [*self._pairing.values(), *([self._timer] if self._timer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for life in list(self._ports):
            self._close_port(life)
        await asyncio.gather(*self._closing)
        self._timer = None

    def register(self, worker: RegisteredWorker, load: WorkerLoad) -> None:
        """Makes a worker known and pairs it with every worker of the other role.

        Raises:
            Exhausted: MOST_WORKERS are known under other names; silent ones are forgotten by and by.
        """
        is_new = self._registry.find(worker.life) is None
        if is_new and not self._registry.has_room(worker, MOST_WORKERS):
            raise Exhausted(f"{MOST_WORKERS} workers are known already", retry_after_s=SILENCE_S)
        replaced = self._registry.register(worker, load, self._clock.now())
        if replaced is not None:
            logger.info("%s came back as another process at %s", worker.life.worker, worker.endpoint)
            self._close_port(replaced.life)
        if is_new or replaced is not None:
            logger.info(
                "%s worker %s registered at %s", worker.role.value, worker.life.worker, worker.endpoint
            )
            self._ports[worker.life] = self._open(worker)
            self._note_change()
        self.pair_due()

    def role_of(self, life: WorkerLife) -> Role | None:
        """What a worker registered as; None where it isn't known."""
        state = self._registry.find(life)
        return None if state is None else state.worker.role

    def heartbeat(self, life: WorkerLife, load: WorkerLoad, counters: WorkerCounters = NO_WORK) -> bool:
        """Takes a sign of life; false where the worker has to register again."""
        before = self._registry.find(life)
        known = self._registry.heartbeat(life, load, self._clock.now(), counters)
        if before is not None and before.load.draining != load.draining:
            self._note_change()
        return known

    async def drain(self, life: WorkerLife) -> int:
        """Lets a worker take no new work, from this call on; requests that it still has.

        Raises:
            Unavailable: it is gone or doesn't answer, and takes new work as before.
        """
        port, news = self.port(life), self._registry.set_draining(life, True)
        if news:
            self._note_change()
        try:
            return await port.drain()
        except KvpactError:
            if news and self._registry.set_draining(life, False):
                self._note_change()
            raise

    def obstacle(self, life: WorkerLife) -> str:
        """Why a known worker gets no request that needs a handoff; empty where it can."""
        return obstacle_of(self._registry.snapshot(), life)

    def expire_silent(self) -> None:
        """Forgets workers that said nothing for SILENCE_S: one that was draining has ended in order."""
        draining = self._registry.snapshot().draining()
        for worker in self._registry.expire(self._clock.now() - SILENCE_S):
            if worker.life in draining:
                logger.info("%s has ended", worker.life.worker)
            else:
                logger.warning("%s has been silent for %g s and is forgotten", worker.life.worker, SILENCE_S)
            self._close_port(worker.life)
            self._note_change()

    def forget(self, life: WorkerLife) -> None:
        """Drops a worker that was ended; nothing happens where it isn't known."""
        if self._registry.forget(life):
            logger.info("%s has ended", life.worker)
            self._close_port(life)
            self._note_change()

    def lives(self) -> list[WorkerLife]:
        """Known workers."""
        return [state.worker.life for state in self._registry.snapshot().workers]

    def suspect(self, key: PairKey, error: KvpactError) -> None:
        """Takes a pair out of use after a failure and pairs it anew."""
        if self._registry.set_aside(key, str(error)):
            self._note_change()
            self.pair_due()

    def quarantine(self, key: PairKey, error: KvpactError) -> None:
        """Takes a pair out of use for QUARANTINE_S after its data failed a check."""
        if not self._registry.quarantine(key, str(error), self._clock.now() + QUARANTINE_S):
            return
        logger.warning("%s are in quarantine for %g s: %s", _names(key), QUARANTINE_S, error)
        self._metrics.pair_quarantined(error.reason.lower())
        self._wake()

    def pair_due(self) -> None:
        """Begins to pair every pair that waits for it and isn't in quarantine."""
        for key in self._registry.unpaired(self._clock.now()):
            if key not in self._pairing:
                self._pairing[key] = asyncio.create_task(self._pair(key), name="pairing")

    def assign(self, lives: list[WorkerLife], change: int) -> None:
        """Adds `change` to the requests that these workers hold."""
        self._registry.assign(lives, change)

    def snapshot(self) -> Snapshot:
        """All workers and pairs now."""
        return self._registry.snapshot()

    def prefill_port(self, life: WorkerLife) -> PrefillPort:
        """Port to a prefill worker. Raises Unavailable if it is gone."""
        return cast("PrefillPort", self.port(life))

    def decode_port(self, life: WorkerLife) -> DecodePort:
        """Port to a decode worker. Raises Unavailable if it is gone."""
        return cast("DecodePort", self.port(life))

    def port(self, life: WorkerLife) -> WorkerPort:
        """Port to a worker. Raises Unavailable if it is gone."""
        if life not in self._ports:
            raise Unavailable(f"worker {life.worker} is gone")
        return self._ports[life]

    def settling_s(self) -> float:
        """Seconds that are left of the time granted after workers came or went; 0 when things are at rest."""
        if self._last_change_s is None:
            return 0.0
        return max(0.0, self._last_change_s + SETTLING_S - self._clock.now())

    def change(self) -> Awaitable[object]:
        """Awaits the next change of a worker or a pair after this call."""
        return self._changed.wait()

    def _note_change(self) -> None:
        self._last_change_s = self._clock.now()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _open(self, worker: RegisteredWorker) -> WorkerPort:
        if worker.role is Role.PREFILL:
            return self._transport.prefill_port(worker.endpoint)
        return self._transport.decode_port(worker.endpoint)

    def _close_port(self, life: WorkerLife) -> None:
        port = self._ports.pop(life, None)
        if port is not None:
            task = asyncio.ensure_future(port.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _pair(self, key: PairKey) -> None:
        try:
            await self._pair_until_settled(key)
        finally:
            del self._pairing[key]

    async def _pair_until_settled(self, key: PairKey) -> None:
        """Tries until the pair has a verdict, is in quarantine, or one of the two is gone."""
        failures = 0
        while (decode := self._registry.find(key.decode)) and self._is_due(key):
            try:
                paired = await self.prefill_port(key.prefill).connect(decode.worker.partner())
            except (DataLoss, ContractRefused) as error:
                if isinstance(error, DataLoss) and error.check == "canary":
                    self._metrics.canary_ran(passed=False)
                self.quarantine(key, error)
                return
            except Exception as error:  # whatever it is, the pair must not wait for ever
                failures += 1
                self._registry.set_aside(key, _trouble(error))
                unexpected = error if not isinstance(error, KvpactError) else None
                logger.warning(
                    "pairing %s failed, try %d: %s", _names(key), failures, error, exc_info=unexpected
                )
                await asyncio.sleep(self._delay_s(failures))
                continue
            if self._is_due(key):
                self._record(key, paired)

    def _is_due(self, key: PairKey) -> bool:
        return self._registry.is_due(key, self._clock.now())

    def _record(self, key: PairKey, paired: Paired) -> None:
        verdict = paired.verdict
        if paired.canary is not None:
            self._metrics.canary_ran(passed=True)
            _log_canary(key, paired.canary)
        self._registry.record_verdict(key, verdict, paired.transport)
        self._wake()
        self._metrics.differences_found(verdict.differences)
        logger.info("pair %s: %s", _names(key), render_verdict(verdict))
        if verdict.word is VerdictWord.REJECT and any(pair.usable() for pair in self.snapshot().pairs):
            logger.warning("%s get no requests: they differ in %s", _names(key), refusing_fields(verdict))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                self.expire_silent()
                self.pair_due()
            except Exception:
                logger.exception("a look at the fleet failed; the next one is in %g s", HEARTBEAT_INTERVAL_S)


def _names(key: PairKey) -> str:
    return f"{key.prefill.worker} with {key.decode.worker}"


def _trouble(error: Exception) -> str:
    return str(error) if isinstance(error, KvpactError) else f"internal error, {type(error).__name__}"


def _log_canary(key: PairKey, canary: CanaryOutcome) -> None:
    logger.info(
        "pair %s: its probe is off by %.3g, allowed %.3g", _names(key), canary.max_abs_error, canary.tolerance
    )
