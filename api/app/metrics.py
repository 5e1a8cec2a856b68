"""Metrics of the server in Prometheus' text format, read without touching a stage."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector

from staged_pool.api.app.engine_metrics import engine_families
from staged_pool.api.app.engine_totals import EngineTotals
from staged_pool.api.app.families import gauge
from staged_pool.api.app.http_metrics import http_families
from staged_pool.api.app.load_report import LoadCollector, ServerLoad
from staged_pool.api.app.pipeline_metrics import PipelineCollector
from staged_pool.api.limits.http_statistics import HttpMeter, HttpStatistics
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.runtime.version import VERSION

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST.encode()
OPENMETRICS_TYPE: Final = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS: Final = OPENMETRICS_TYPE.split(b";")[0]
_write_openmetrics: Final[Callable[[CollectorRegistry], bytes]] = (
    partial(openmetrics_exposition.generate_latest, escaping=openmetrics_exposition.ALLOWUTF8)
    if hasattr(openmetrics_exposition, "ALLOWUTF8")
    else openmetrics_exposition.generate_latest
)
"""With its default, prometheus_client 0.22 and later write the samples of `vllm:` names with an underscore."""

_VERSIONS: Final = {
    "version": VERSION,
    "python": platform.python_version(),
    **{name: metadata.version(name) for name in ("torch", "transformers", "anyio")},
}
"""Versions of what this process runs, read from files at import."""


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
        self.server_state = server_state
        self.http = HttpMeter(server_state)
        self._registry = metrics_registry(engines, self.http.snapshot, totals)
        ProcessCollector(registry=self._registry)

    def text(self, *, openmetrics: bool = False) -> bytes:
        """Return all metrics as of now; see `metrics_text`."""
        return metrics_text(self._registry, openmetrics=openmetrics)


def wants_openmetrics(accept: bytes) -> bool:
    """Return True if an `Accept` header asks for OpenMetrics, as Prometheus' does."""
    return any(part.split(b";")[0].strip().lower() == _OPENMETRICS for part in accept.split(b","))


def metrics_text(registry: CollectorRegistry, *, openmetrics: bool) -> bytes:
    """Write all metrics as of now.

    Args:
        registry: The metrics.
        openmetrics: Write `OPENMETRICS_TYPE`, with exemplars, instead of `CONTENT_TYPE`.
    """
    return _write_openmetrics(registry) if openmetrics else generate_latest(registry)


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
    registry.register(_BuildCollector())
    registry.register(_ServerCollector(engines.statistics, http, totals or EngineTotals(engine_families)))
    registry.register(PipelineCollector(engines.pipeline_statistics))
    registry.register(LoadCollector(engines.load))
    return registry


class _BuildCollector(Collector):
    """The versions that this process runs."""

    def __init__(self) -> None:
        self._family = GaugeMetricFamily(
            "staged_pool_build_info", "1, with the versions of the server and its libraries", labels=tuple(_VERSIONS)
        )
        self._family.add_metric(tuple(_VERSIONS.values()), 1)

    def collect(self) -> Iterator[Metric]:
        yield self._family


class _ServerCollector(Collector):
    """Converts the snapshots of engines and HTTP to metric families on each scrape."""

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, EngineStatistics]],
        http: Callable[[], HttpStatistics],
        totals: EngineTotals,
    ) -> None:
        self._statistics = statistics
        self._http = http
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        engines = self._statistics()
        ready = bool(engines) and all(engine.phase == "ready" and engine.fault is None for engine in engines.values())
        yield gauge("ready", "1 while requests are accepted", ready)
        yield from self._totals.families(engines)
        yield from http_families(self._http(), engines)

    def describe(self) -> Iterable[Metric]:
        return ()  # Prometheus' client would otherwise collect at registration, before an engine is loaded
