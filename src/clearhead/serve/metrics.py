"""Prometheus metrics: requests by route, and queue, rows, tokens and time to first token by model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import Scope

if TYPE_CHECKING:
    from clearhead.serve.registry import ServedModel

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options = {"namespace": "clearhead", "registry": self.registry}
        self.requests = Counter("requests", "Requests by route and status", ["route", "status"], **options)  # type: ignore[arg-type]
        self.seconds = Histogram("request_seconds", "Time of a request", ["route"], buckets=SECONDS, **options)  # type: ignore[arg-type]
        self.first_token = Histogram(
            "first_token_seconds",
            "Time from submission to the first token",
            ["model"],
            buckets=SECONDS,
            **options,  # type: ignore[arg-type]
        )
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts and sources", ["model"], **options)  # type: ignore[arg-type]
        self.new_tokens = Counter("new_tokens", "Generated tokens", ["model"], **options)  # type: ignore[arg-type]
        self.restarts = Counter("engine_failures", "Engines that failed and were started again", ["model"], **options)  # type: ignore[arg-type]

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a finished request."""
        route = getattr(scope.get("route"), "path", "other")
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def watch(self, models: Iterable[ServedModel]) -> None:
        """Report the present state of models, and their counters from zero on."""
        watched = list(models)
        self.registry.register(_State(watched))
        for served in watched:
            for metric in (self.first_token, self.prompt_tokens, self.new_tokens, self.restarts):
                metric.labels(served.name)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _State:
    """Gauges that are read when they are asked for."""

    def __init__(self, models: list[ServedModel]):
        self.models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of all models."""
        readings = {
            "ready": ("Whether the model's engine runs", lambda m: float(not m.generates or m.engine is not None)),
            "waiting": ("Sequences and calls that wait", lambda m: m.waiting),
            "running": ("Rows of the batch", lambda m: m.stats.running),
            "pages_used": ("Pages of the KV cache in use", lambda m: m.stats.pages_used),
            "pages_free": ("Pages of the KV cache that are free", lambda m: m.stats.pages_free),
            "cached_prompt_tokens": ("Prompt tokens found in the cache", lambda m: m.stats.cached_prompt_tokens),
            "preemptions": ("Sequences that made room and were computed again", lambda m: m.stats.preemptions),
        }
        for name, (described, read) in readings.items():
            family = GaugeMetricFamily(f"clearhead_{name}", described, labels=["model"])
            for served in self.models:
                family.add_metric([served.name], float(read(served)))  # type: ignore[no-untyped-call]
            yield family
