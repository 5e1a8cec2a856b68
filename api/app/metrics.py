"""Metrics of the server in Prometheus' text format, read without touching a stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from staged_pool.api.app.engine_metrics import engine_families, gauge
from staged_pool.api.app.engine_totals import EngineTotals
from staged_pool.api.app.http_metrics import HttpCollector
from staged_pool.api.app.http_statistics import HttpStatistics
from staged_pool.api.app.load_report import LoadCollector, ServerLoad
from staged_pool.api.app.pipeline_metrics import PipelineCollector
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.stages.meter import Histogram

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST.encode()


class Reported(Protocol):
    """Reports on the engines and pipelines of a server."""

    def statistics(self) -> Mapping[str, EngineStatistics]:
        """Return a snapshot of each engine by its model's name; empty until they are loaded."""
        ...

    def pipeline_statistics(self) -> Mapping[str, PipelineStatistics]:
        """Return a snapshot of each pipeline by its name."""
        ...

    def load(self) -> ServerLoad:
        """Return the load of all models."""
        ...


class ServerMetrics:
    """Metrics of one server, in a registry of their own: a process may run several servers.

    Args:
        engines: The engines and pipelines.
        server_state: State of the HTTP server.
        totals: See `metrics_registry`.
    """

    def __init__(self, engines: Reported, server_state: ServerState, totals: EngineTotals | None = None) -> None:
        self._server_state = server_state
        self._counts: Counter[tuple[str, int, str]] = Counter()
        """Finished requests by route, status, and path through the server (fast, general)."""
        self._durations: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Durations in seconds by route."""
        self._registry = metrics_registry(engines, self.http, totals)
        ProcessCollector(registry=self._registry)

    def observe(self, route: str, status: int, path_taken: str, seconds: float) -> None:
        """Count one finished request. `route` must be a known route, never a client's path: labels must stay few."""
        self._counts[route, status, path_taken] += 1
        self._durations[route].observe(seconds)

    def http(self) -> HttpStatistics:
        """Return a snapshot of the HTTP side."""
        durations = {route: histogram.snapshot() for route, histogram in self._durations.items()}
        return HttpStatistics.of(self._server_state, self._counts, durations)

    def text(self) -> bytes:
        """Return all metrics as of now, in the content type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def metrics_registry(
    engines: Reported, http: Callable[[], HttpStatistics], totals: EngineTotals | None = None
) -> CollectorRegistry:
    """Return a registry of all metrics but those of processes.

    Args:
        engines: The engines and pipelines.
        http: Returns a snapshot of the HTTP side.
        totals: Counters of engines that others have replaced. None: there are none.
    """
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engines.statistics, totals or EngineTotals(engine_families)))
    registry.register(PipelineCollector(engines.pipeline_statistics))
    registry.register(LoadCollector(engines.load))
    registry.register(HttpCollector(http))
    return registry


class _EngineCollector(Collector):
    """Converts the engines' snapshots to metric families on each scrape."""

    def __init__(self, statistics: Callable[[], Mapping[str, EngineStatistics]], totals: EngineTotals) -> None:
        self._statistics = statistics
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        engines = self._statistics()
        ready = bool(engines) and all(engine.phase == "ready" and engine.fault is None for engine in engines.values())
        yield gauge("ready", "1 while requests are accepted", ready)
        yield from self._totals.families(engines)

    def describe(self) -> Iterable[Metric]:
        return ()  # Prometheus' client would otherwise collect at registration, before an engine is loaded
