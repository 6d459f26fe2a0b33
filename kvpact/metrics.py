"""What is measured while serving: Prometheus metrics in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpact.block_metrics import BlockMetrics
from kvpact.types import Difference, FinishReason, Role, WorkerCounters, WorkerLoad

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ERRORS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
MOST_FIELDS = 128
"""Labels by field of a difference; workers name the fields, and there are fewer that we know."""


class Metrics:
    """All metrics of one coordinator. `model_name` labels the ones that go by vLLM's names."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._requests = self._counter(
            "kvpact_requests", "Requests that ended, by how.", ("endpoint", "finish_reason", "code")
        )
        self._latencies = {
            "ttft": self._histogram("kvpact_time_to_first_token_seconds", "Request accepted to first token."),
            "itl": self._histogram("kvpact_inter_token_seconds", "Time between tokens."),
            "e2e": self._histogram("kvpact_request_seconds", "Request accepted to last token."),
        }
        self._blocks = BlockMetrics(self._registry, (model_name, "0"))
        self._fields: set[str] = set()
        self._quarantined = Gauge(
            "kvpact_quarantined_staging_bytes",
            "Staging that nobody may have, since a partner that went silent may still write into it.",
            ("role", "worker"),
            registry=self._registry,
        )
        self._add_handoffs()
        self._add_pairs()
        self._vllm = _VllmNames(self._registry, model_name)

    def _add_handoffs(self) -> None:
        self._handoffs = self._counter("kvpact_handoffs", "Handoffs that ended, by result.", ("result",))
        self._local_prefills = self._counter(
            "kvpact_local_prefills", "Prompts that a decode worker computed itself, without a handoff."
        )
        self._handoff_bytes = self._counter("kvpact_handoff_bytes", "Payload bytes of committed handoffs.")
        self._handoff_s = self._histogram(
            "kvpact_handoff_seconds", "First chunk sent to commit acknowledged."
        )
        self._exposed_s = self._histogram(
            "kvpact_handoff_exposed_seconds", "Part of it after the prompt's compute."
        )
        self._witness_checks = self._counter(
            "kvpact_witness_checks", "Handoffs whose witness rows were checked, by result.", ("result",)
        )
        self._lossy_error = Histogram(
            "kvpact_handoff_max_abs_error",
            "Largest absolute error of a key or value, measured on each handoff whose plan is lossy.",
            registry=self._registry,
            buckets=_ERRORS,
        )

    def _add_pairs(self) -> None:
        self._canaries = self._counter("kvpact_canary", "Probes of worker pairs, by result.", ("result",))
        self._differences = self._counter(
            "kvpact_contract_differences", "Differences found when workers paired.", ("field", "action")
        )
        self._quarantines = self._counter(
            "kvpact_pair_quarantines", "Pairs put in quarantine, by the failed check's reason.", ("reason",)
        )
        self._pairs = Gauge("kvpact_pairs", "Worker pairs by verdict.", ("verdict",), registry=self._registry)
        self._pair_transports = Gauge(
            "kvpact_pair_transports",
            "Usable worker pairs by how payloads travel.",
            ("transport",),
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=_SECONDS)

    def handoff_committed(
        self, *, payload_bytes: int, handoff_s: float, exposed_s: float, max_abs_error: float | None = None
    ) -> None:
        """Counts one handoff that the decode worker owns now; an error is given where its plan is lossy."""
        self._witness_checks.labels("passed").inc()
        if max_abs_error is not None:
            self._lossy_error.observe(max_abs_error)
        self._handoffs.labels("committed").inc()
        self._handoff_bytes.inc(payload_bytes)
        self._handoff_s.observe(handoff_s)
        self._exposed_s.observe(exposed_s)

    def handoff_ended(self, result: str) -> None:
        """Counts one handoff that came to nothing.

        `result` is an error's reason or `cancelled`; `lost_after_commit` is counted besides its `committed`.
        """
        self._handoffs.labels(result).inc()

    def prefilled_locally(self) -> None:
        """Counts one prompt that a decode worker computed itself."""
        self._local_prefills.inc()

    def witnesses_refused(self) -> None:
        """Counts one handoff whose witnesses didn't hold."""
        self._witness_checks.labels("failed").inc()

    def canary_ran(self, *, passed: bool) -> None:
        """Counts one probe of a pair."""
        self._canaries.labels("passed" if passed else "failed").inc()

    def pair_quarantined(self, reason: str) -> None:
        """Counts one pair that is put in quarantine."""
        self._quarantines.labels(reason).inc()

    def differences_found(self, differences: Iterable[Difference]) -> None:
        """Counts the differences of one verdict."""
        for difference in differences:
            field = difference.field
            if field not in self._fields and len(self._fields) >= MOST_FIELDS:
                field = "other"
            self._fields.add(field)
            self._differences.labels(field, difference.action.value).inc()

    def request_started(self, *, prompt_tokens: int, max_output_tokens: int) -> None:
        """Counts one prompt that is about to be computed."""
        self._vllm.running.inc()
        self._vllm.prompt_tokens.inc(prompt_tokens)
        self._vllm.request_prompt_tokens.observe(prompt_tokens)
        self._vllm.request_max_tokens.observe(max_output_tokens)

    def first_tokens(self, count: int, seconds: float) -> None:
        """Observes a request's first `count` >= 1 tokens, which came together `seconds` after acceptance."""
        self._latencies["ttft"].observe(seconds)
        self._vllm.ttft.observe(seconds)
        self._vllm.generation_tokens.inc(count)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Observes `count` >= 1 tokens that came together `seconds` after the ones before."""
        for _ in range(count):
            self._latencies["itl"].observe(seconds / count)
            self._vllm.itl.observe(seconds / count)
        self._vllm.generation_tokens.inc(count)

    def request_ended(
        self, *, endpoint: str, finish_reason: FinishReason, tokens: int, ttft_s: float, e2e_s: float
    ) -> None:
        """Counts one prompt that ended well or was cancelled; times in seconds from acceptance.

        A cancelled one is no success, and its length and duration are its client's doing.
        """
        self._vllm.running.dec()
        self._requests.labels(endpoint, finish_reason.value, "").inc()
        if finish_reason is FinishReason.CANCELLED:
            return
        self._vllm.success.labels(finish_reason.value).inc()
        if tokens == 0:
            return
        self._latencies["e2e"].observe(e2e_s)
        self._vllm.finished(tokens=tokens, ttft_s=ttft_s, e2e_s=e2e_s)

    def request_broke(self) -> None:
        """Takes one prompt that failed out of the running ones."""
        self._vllm.running.dec()

    def request_failed(self, *, endpoint: str, code: str) -> None:
        """Counts one HTTP request that was answered by an error."""
        self._requests.labels(endpoint, "", code).inc()

    def exposition(
        self,
        *,
        pairs: Iterable[str],
        loads: Iterable[tuple[Role, str, WorkerLoad]],
        transports: Iterable[str] = (),
        counters: Iterable[tuple[Role, str, WorkerCounters]] = (),
    ) -> bytes:
        """All metrics as text.

        Args:
            pairs: PairState's words.
            loads: (role, worker, load), the worker by the name to show.
            transports: their names, one for each pair that has settled on one.
            counters: (role, worker, work of its life), the worker by its own name.
        """
        loads = tuple(loads)
        self._blocks.set_loads(loads)
        self._blocks.add_counters(counters)
        self._pair_transports.clear()
        for name in transports:
            self._pair_transports.labels(name).inc()
        self._pairs.clear()
        for word in pairs:
            self._pairs.labels(word).inc()
        self._quarantined.clear()
        waiting, used, total = 0, 0, 0
        for role, worker, load in loads:
            free = load.blocks.free
            self._quarantined.labels(role.value, worker).set(load.quarantined_staging_bytes)
            waiting += load.waiting_requests
            if role is Role.DECODE:
                used, total = used + load.blocks.total - free, total + load.blocks.total
        self._vllm.waiting.set(waiting)
        self._vllm.cache_usage.set(used / total if total else 0.0)
        return generate_latest(self._registry)


class _VllmNames:
    """The engine-independent metrics under the names that public dashboards read."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, "0")
        self.running = self._gauge("num_requests_running", "Prompts that are computed or decoded.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait in workers.")
        self.cache_usage = self._gauge(
            "kv_cache_usage_perc", "Used share of the decode workers' blocks, 0 to 1."
        )
        self.prompt_tokens = self._count("prompt_tokens", "Prompt tokens accepted.")
        self.generation_tokens = self._count("generation_tokens", "Output tokens.")
        self.success = _Bound(
            Counter(
                "vllm:request_success",
                "Finished prompts.",
                ("model_name", "engine", "finished_reason"),
                registry=registry,
            ),
            self._values,
        )
        self.request_prompt_tokens = self._sizes("request_prompt_tokens", "Prompt tokens of a request.")
        self.request_tokens = self._sizes("request_generation_tokens", "Output tokens of a request.")
        self.request_max_tokens = self._sizes(
            "request_params_max_tokens", "Output tokens allowed to a request."
        )
        self.ttft = self._times("time_to_first_token_seconds", "Acceptance to first token.")
        self.itl = self._times("inter_token_latency_seconds", "Time between tokens.")
        self.per_token = self._times(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens."
        )
        self.e2e = self._times("e2e_request_latency_seconds", "Acceptance to last token.")
        self.prefill = self._times(
            "request_prefill_time_seconds", "Acceptance to first token, handoff included."
        )
        self.decode = self._times("request_decode_time_seconds", "First to last token.")

    def finished(self, *, tokens: int, ttft_s: float, e2e_s: float) -> None:
        """Observes one prompt of `tokens` >= 1 output tokens."""
        self.request_tokens.observe(tokens)
        self.e2e.observe(e2e_s)
        self.prefill.observe(ttft_s)
        self.decode.observe(e2e_s - ttft_s)
        if tokens > 1:
            self.per_token.observe((e2e_s - ttft_s) / (tokens - 1))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry).labels(
            *self._values
        )

    def _count(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry).labels(
            *self._values
        )

    def _times(self, name: str, text: str) -> Histogram:
        return self._spread(name, text, _SECONDS)

    def _sizes(self, name: str, text: str) -> Histogram:
        return self._spread(name, text, _TOKENS)

    def _spread(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        spread = Histogram(
            f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry, buckets=buckets
        )
        return spread.labels(*self._values)


class _Bound:
    """A counter whose first labels are settled."""

    def __init__(self, counter: Counter, values: tuple[str, ...]) -> None:
        self._counter = counter
        self._values = values

    def labels(self, *more: str) -> Counter:
        """The counter at the settled labels and `more`."""
        return self._counter.labels(*self._values, *more)
