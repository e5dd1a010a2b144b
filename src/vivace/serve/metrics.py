"""Prometheus metrics with the names and units of vLLM under our prefix, and on request under vLLM's as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

from vivace.serve.choice import Choice

if TYPE_CHECKING:
    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

    from vivace.serve.server_metrics import ServerFigures
    from vivace.serve.worker import Worker

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first tokens.", _SECONDS),
    "inter_token_latency_seconds": ("Time between steps of an answer, divided among the tokens of a step.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time spent waiting for a slot.", _SECONDS),
    "request_prefill_time_seconds": ("Time spent reading the prompt.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first tokens to the last.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("New tokens of an answer.", _TOKENS),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished answers.",
    "generation_tokens": "New tokens of all answers.",
    "spec_decode_num_drafts": "Verified steps, those without a draft included.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
BY_LABEL = {
    "request_success": ("finished_reason", "Finished answers."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "position",
        "Drafted tokens that were accepted, by position in the draft.",
    ),
}
"""By metric: its label and its meaning."""
GAUGES = {
    "num_requests_running": "Sequences in a slot.",
    "num_requests_waiting": "Sequences in the queue.",
    "num_requests_waiting_for_memory": "1 while a sequence waits for memory and a slot is free.",
    "kv_cache_usage_perc": "Stored entries as a share of what all slots may hold.",
    "kv_bytes": "Memory of all blocks of keys and values in use, drafters' own and kept prompts included.",
    "kv_bytes_kept": "The part of it that only kept prompts hold; it is given back when it is needed.",
    "kv_bytes_limit": "Memory that `--memory` leaves for them beside weights and drafters; infinite without it.",
    "prompt_cache_bytes": "Files of the prompt cache on disk, those of other models included.",
    "kv_blocks": "Blocks of the model's texts in use.",
    "kv_blocks_shared": "Blocks among them that several texts have, or a text and the kept prompts.",
}
WORKER_COUNTERS = {
    "target_passes": "Decoding passes of the model; one over several sequences counts once.",
    "prefix_cache_queries": "Prompt tokens looked up among the entries of earlier prompts.",
    "prefix_cache_hits": "Prompt tokens found among them.",
    "prefix_cache_evictions": "Stretches of kept prompts that made room for texts.",
    "prompt_cache_hits": "Prompt tokens found on disk (`--prompt-cache`).",
    "preemptions": "Times a sequence lost its slot to older ones because memory ended, and was read again.",
    "kv_blocks_copied": "Blocks copied because a text continued where others read.",
}


class WorkerFigures:
    """A Prometheus collector that reads the worker on request."""

    def __init__(self, prefix: str, labels: Sequence[str], worker: Worker) -> None:
        self._prefix = prefix
        self._labels = labels
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yield the worker's current gauges and counters."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        worker, cache = self._worker, self._worker.session.cache
        entries = cache.num_slots * cache.capacity
        limit, prefix = worker.memory.room_bytes, worker.prefix
        gauges = (
            worker.num_running,
            worker.num_waiting,
            int(worker.waits_for_memory),
            sum(cache.lengths) / entries,
            worker.memory.taken_bytes,
            prefix.evictable_bytes if prefix else 0,
            inf if limit is None else limit,
            worker.on_disk.directory.num_bytes if worker.on_disk else 0,
            sum(pool.num_taken for pool in cache.store.pools),
            sum(pool.num_shared for pool in cache.store.pools),
        )
        for (stem, text), value in zip(GAUGES.items(), gauges, strict=True):
            gauge = GaugeMetricFamily(self._prefix + stem, text, labels=("model_name",))
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = (
            worker.num_target_passes,
            prefix.num_queries if prefix else 0,
            prefix.num_hits if prefix else 0,
            prefix.num_evicted if prefix else 0,
            worker.on_disk.num_hits if worker.on_disk else 0,
            worker.num_preemptions,
            cache.store.num_copied,
        )
        for (stem, text), value in zip(WORKER_COUNTERS.items(), counters, strict=True):
            counter = CounterMetricFamily(self._prefix + stem, text, labels=("model_name",))
            counter.add_metric(self._labels, value)
            yield counter


class Metrics:
    """The Prometheus metrics of a server: histograms, counters, and collectors that read their values on request."""

    def __init__(self, model_name: str, worker: Worker, figures: ServerFigures, *, compat: bool) -> None:
        """Register the metrics.

        Args:
            model_name: value of the label.
            worker: read when the metrics are.
            figures: of the server around it, read then too.
            compat: also under ``vllm:``.
        """
        import prometheus_client
        from prometheus_client import CollectorRegistry, Histogram

        self.registry = CollectorRegistry()
        self.registry.register(figures)
        self._histograms: dict[str, list[Histogram]] = {}
        self._counters: dict[str, list[Counter]] = {}
        self._success: list[Counter] = []
        self._positions: list[Counter] = []
        self._label = model_name
        for prefix in ("vivace_", "vllm:") if compat else ("vivace_",):
            for stem, (text, buckets) in HISTOGRAMS.items():
                found = Histogram(prefix + stem, text, ("model_name",), registry=self.registry, buckets=buckets)
                self._histograms.setdefault(stem, []).append(found)
            for stem, text in COUNTERS.items():
                counter = prometheus_client.Counter(prefix + stem, text, ("model_name",), registry=self.registry)
                counter.labels(model_name)
                self._counters.setdefault(stem, []).append(counter)
            self._success.append(self._by(prefix, "request_success"))
            self._positions.append(self._by(prefix, "spec_decode_num_accepted_tokens_per_pos"))
            self.registry.register(WorkerFigures(prefix, (model_name,), worker))

    def _by(self, prefix: str, stem: str) -> Counter:
        from prometheus_client import Counter

        label, text = BY_LABEL[stem]
        return Counter(prefix + stem, text, ("model_name", label), registry=self.registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def observe(self, stem: str, values: Iterable[float]) -> None:
        """Add values to a histogram, under each prefix."""
        for value in values:
            for histogram in self._histograms[stem]:
                histogram.labels(self._label).observe(value)

    def count(self, stem: str, amount: float) -> None:
        """Add an amount to a counter, under each prefix."""
        for counter in self._counters[stem]:
            counter.labels(self._label).inc(amount)

    def finished(self, choice: Choice, arrived_at: float, queue_s: float) -> None:
        """Record the times and counts of an answer that is complete."""
        stats = choice.stats
        assert stats is not None
        self.observe("e2e_request_latency_seconds", [choice.last_at - arrived_at])
        self.observe("request_queue_time_seconds", [queue_s])
        self.observe("request_prefill_time_seconds", [stats.prefill_s])
        self.observe("request_decode_time_seconds", [stats.decode_s])
        self.observe("request_prompt_tokens", [stats.num_prompt_tokens])
        self.observe("request_generation_tokens", [stats.num_tokens])
        self.count("prompt_tokens", stats.num_prompt_tokens)
        self.count("spec_decode_num_drafts", stats.num_spec_steps)
        self.count("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self.count("spec_decode_num_accepted_tokens", stats.num_accepted_draft_tokens)
        for success in self._success:
            success.labels(self._label, choice.finish_reason).inc()
        for counter in self._positions:
            for position, accepted in enumerate(stats.accepted_per_position):
                counter.labels(self._label, str(position)).inc(accepted)
