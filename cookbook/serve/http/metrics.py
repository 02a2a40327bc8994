"""Prometheus metrics. No tenant, session or model is a label, so that the number of time series stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cookbook.serve.core.tickets import Ticket

if TYPE_CHECKING:
    from cookbook.serve.core.service import TrainingService

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of finished operations; `watch` adds the gauges of a service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "cookbook_operations", "Finished operations.", ["kind", "outcome"], registry=self.registry
        )
        self._tokens = Counter(
            "cookbook_tokens", "Tokens of finished operations, by kind of work.", ["kind"], registry=self.registry
        )
        self._seconds = Histogram(
            "cookbook_operation_seconds",
            "Run time, without the time in the queue.",
            ["kind"],
            registry=self.registry,
            buckets=SECONDS,
        )

    def watch(self, service: TrainingService) -> None:
        depth = Gauge("cookbook_queue_depth", "Operations that wait in the queue.", registry=self.registry)
        depth.set_function(lambda: service.sessions.queue_depth)
        sessions = Gauge("cookbook_sessions", "Sessions that have not ended.", registry=self.registry)
        sessions.set_function(lambda: len(service.sessions.live))

    def observe(self, ticket: Ticket, seconds: float) -> None:
        """Count one finished operation, which ran for `seconds`."""
        kind, error = type(ticket.operation).__name__, ticket.future.exception()
        self._operations.labels(kind, "ok" if error is None else type(error).__name__).inc()
        self._seconds.labels(kind).observe(seconds)
        for name in ("prefill", "sampled", "trained"):
            self._tokens.labels(name).inc(getattr(ticket.usage, name))
