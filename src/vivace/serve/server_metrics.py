"""What a server counts of itself, for Prometheus: responses, how sequences ended, connections, and how late it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.serve.loop_lag import LoopLag

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from vivace.serve.call import Calls
    from vivace.serve.connections import Connections
    from vivace.serve.worker import Worker

SERVER_COUNTERS = {
    "http_responses": ("route, status", "Responses by route and status; 499: the client left before its answer."),
    "requests": ("state", "Accepted sequences (`received`), and how they ended: `finished`, `failed` with an "
                          "error, or `cancelled` because their client left."),
    "connections_cut": ("reason", "Connections that the server closed, by reason."),
}  # fmt: skip
"""By metric: its labels and its meaning."""
SERVER_GAUGES = {
    "connections_open": "Open connections.",
    "worker_busy_seconds": "Time for which the worker has been in its current step; 0 while it is idle.",
    "event_loop_lag_worst_seconds": "Longest delay of the event loop since the start.",
}
LAG = "event_loop_lag_seconds"
LAG_MEANING = "Delays of the event loop; one that blocks counts for as long as it lasts."


@dataclass(eq=False)
class ServerFigures:
    """A Prometheus collector that reads the current counts on request."""

    label: str
    """Name of the model."""
    calls: Calls
    connections: Connections
    worker: Worker
    lag: LoopLag = field(default_factory=LoopLag)

    def collect(self) -> Iterator[Metric]:
        """Yield the current counts of responses, requests and connections, and the lateness of the event loop."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        counted: dict[str, list[tuple[Sequence[str], int]]] = {
            "http_responses": list(self.connections.responses.copy().items()),
            "requests": [((state,), count) for state, count in self.calls.states.items()],
            "connections_cut": [((reason,), count) for reason, count in self.connections.cut.items()],
        }
        for stem, (labels, text) in SERVER_COUNTERS.items():
            counter = CounterMetricFamily(f"vivace_{stem}", text, labels=("model_name", *labels.split(", ")))
            for values, count in counted[stem]:
                counter.add_metric((self.label, *values), count)
            yield counter
        gauges = (len(self.connections.open), self.worker.heartbeat.busy_s, self.lag.worst_s)
        for (stem, text), value in zip(SERVER_GAUGES.items(), gauges, strict=True):
            gauge = GaugeMetricFamily(f"vivace_{stem}", text, labels=("model_name",))
            gauge.add_metric((self.label,), value)
            yield gauge
        lag = HistogramMetricFamily(f"vivace_{LAG}", LAG_MEANING, labels=("model_name",))
        lag.add_metric((self.label,), self.lag.buckets(), self.lag.sum_s)
        yield lag
