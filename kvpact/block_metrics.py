"""Metrics of workers' blocks: free, held for what, and prompt tokens that nobody computes or sends again."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvpact.types import Role, WorkerCounters, WorkerLoad

REASONS = ("sequence", "handoff", "canary")
"""What holds blocks; shown as 0 where it holds none."""


class BlockMetrics:
    """Set from workers' loads and counters as they were told last."""

    def __init__(self, registry: CollectorRegistry, vllm_values: tuple[str, str]) -> None:
        """`vllm_values`: labels model_name and engine of the metrics that go by vLLM's names."""
        self._blocks = Gauge(
            "kvpact_blocks",
            "Blocks of each worker's pool.",
            ("role", "worker", "state"),
            registry=registry,
        )
        self._cached = Gauge(
            "kvpact_blocks_cached",
            "Free blocks of each worker whose content can be reused.",
            ("role", "worker"),
            registry=registry,
        )
        self._held = Gauge(
            "kvpact_blocks_held",
            "Blocks of each worker that something holds, by what; 0 of an idle worker.",
            ("role", "worker", "reason"),
            registry=registry,
        )
        self._prefix_tokens = Counter(
            "kvpact_prefix_tokens",
            "Prompt tokens looked up among cached blocks. A prefill worker needn't compute hits, a decode "
            "worker needn't be sent them.",
            ("role", "result"),
            registry=registry,
        )
        labels = ("model_name", "engine")
        queries = "Prompt tokens that prefill workers looked up among cached blocks."
        self._queries = Counter("vllm:prefix_cache_queries", queries, labels, registry=registry)
        self._hits = Counter("vllm:prefix_cache_hits", "Those that they found.", labels, registry=registry)
        self._vllm_values = vllm_values
        self._seen: dict[tuple[Role, str], WorkerCounters] = {}

    def set_loads(self, loads: Iterable[tuple[Role, str, WorkerLoad]]) -> None:
        """Replaces what was said of blocks. `loads`: (role, worker, load)."""
        self._blocks.clear()
        self._held.clear()
        self._cached.clear()
        for role, worker, load in loads:
            counts = load.blocks
            self._blocks.labels(role.value, worker, "free").set(counts.free)
            self._blocks.labels(role.value, worker, "used").set(counts.total - counts.free)
            self._cached.labels(role.value, worker).set(counts.cached)
            for reason, blocks in (dict.fromkeys(REASONS, 0) | dict(counts.held)).items():
                self._held.labels(role.value, worker, reason).set(blocks)

    def add_counters(self, counters: Iterable[tuple[Role, str, WorkerCounters]]) -> None:
        """Adds what each worker counted since the last time; one that counts less than before began anew."""
        for role, worker, now in counters:
            before = self._seen.get((role, worker), WorkerCounters())
            if now.prefix_query_tokens < before.prefix_query_tokens:
                before = WorkerCounters()
            self._seen[role, worker] = now
            queries = now.prefix_query_tokens - before.prefix_query_tokens
            hits = max(0, now.prefix_hit_tokens - before.prefix_hit_tokens)
            self._prefix_tokens.labels(role.value, "hit").inc(hits)
            self._prefix_tokens.labels(role.value, "miss").inc(max(0, queries - hits))
            if role is Role.PREFILL:
                self._queries.labels(*self._vllm_values).inc(queries)
                self._hits.labels(*self._vllm_values).inc(hits)
