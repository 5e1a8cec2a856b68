"""Metrics of the server in Prometheus' text format, read without touching a stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from staged_pool.api.app.http_metrics import HttpCollector
from staged_pool.api.app.http_statistics import HttpStatistics
from staged_pool.api.app.load_report import LoadCollector, ServerLoad
from staged_pool.api.app.pipeline_metrics import PipelineCollector, buckets_of
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import (
    AdmissionStatistics,
    DeviceStatistics,
    EngineStatistics,
    ImageCacheStatistics,
    PluginStatistics,
    PriorityStatistics,
    ResultCacheStatistics,
)
from staged_pool.stages.meter import Histogram, StageStatistics

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
    """

    def __init__(self, engines: Reported, server_state: ServerState) -> None:
        self._server_state = server_state
        self._counts: Counter[tuple[str, int, str]] = Counter()
        """Finished requests by route, status, and path through the server (fast, general)."""
        self._durations: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Durations in seconds by route."""
        self._registry = metrics_registry(engines, self.http)
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


def metrics_registry(engines: Reported, http: Callable[[], HttpStatistics]) -> CollectorRegistry:
    """Return a registry of all metrics but those of processes.

    Args:
        engines: The engines and pipelines.
        http: Returns a snapshot of the HTTP side.
    """
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engines.statistics))
    registry.register(PipelineCollector(engines.pipeline_statistics))
    registry.register(LoadCollector(engines.load))
    registry.register(HttpCollector(http))
    return registry


class _EngineCollector(Collector):
    """Converts the engines' snapshots to metric families on each scrape."""

    def __init__(self, statistics: Callable[[], Mapping[str, EngineStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        engines = self._statistics()
        ready = bool(engines) and all(engine.phase == "ready" and engine.fault is None for engine in engines.values())
        yield _gauge("ready", "1 while requests are accepted", ready)
        families: dict[str, Metric] = {}
        for name, statistics in engines.items():
            for family in _engine_families(statistics):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [s._replace(labels={"model": name, **s.labels}) for s in family.samples]
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        return ()  # Prometheus' client would otherwise collect at registration, before an engine is loaded


def _engine_families(statistics: EngineStatistics) -> Iterator[Metric]:
    yield from _stage_families(statistics.stages)
    yield from _admission_families(statistics.admission)
    yield from _priority_families(statistics.priorities)
    yield from _device_families(statistics.device)
    yield _counters("cancelled", "Requests whose client left, by stage", "stage", statistics.cancelled)
    yield _counters("expired", "Requests whose deadline passed, by stage", "stage", statistics.expired)
    yield _gauge("stalled", "1 while a forward runs far longer than predicted", statistics.stall is not None)
    overdue = statistics.overdue_preprocess_calls
    yield _gauge("preprocess_overdue_calls", "Preprocess calls that run longer than preprocess_alarm_s", overdue)
    if statistics.image_cache is not None:
        yield from _image_cache_families(statistics.image_cache)
    if statistics.result_cache is not None:
        yield from _result_cache_families(statistics.result_cache)
    if statistics.plugin is not None:
        yield from _plugin_families(statistics.plugin)


def _stage_families(stages: Iterable[StageStatistics]) -> Iterator[Metric]:
    labels = ("stage",)
    waiting = GaugeMetricFamily("staged_pool_stage_waiting_items", "Items that wait for the stage", labels=labels)
    busy = GaugeMetricFamily("staged_pool_stage_busy_workers", "Workers that process an item or a batch", labels=labels)
    workers = GaugeMetricFamily("staged_pool_stage_workers", "Workers of the stage", labels=labels)
    items = CounterMetricFamily("staged_pool_stage_items", "Items that the stage has finished", labels=labels)
    crashes = CounterMetricFamily("staged_pool_stage_crashes", "Crashes of workers", labels=labels)
    dropped = CounterMetricFamily(
        "staged_pool_stage_dropped", "Items that ended in the stage", labels=("stage", "cause")
    )
    wait = HistogramMetricFamily(
        "staged_pool_stage_wait_seconds", "Seconds that items waited for the stage", labels=labels
    )
    service = HistogramMetricFamily(
        "staged_pool_stage_service_seconds", "Seconds that workers processed items", labels=labels
    )
    for stage in stages:
        name = (stage.name,)
        waiting.add_metric(name, stage.waiting)
        busy.add_metric(name, stage.busy)
        workers.add_metric(name, stage.workers)
        items.add_metric(name, stage.done)
        crashes.add_metric(name, stage.crashes)
        for cause, count in stage.dropped.items():
            dropped.add_metric((stage.name, cause), count)
        wait.add_metric(name, buckets_of(stage.wait), stage.wait.sum_s)
        service.add_metric(name, buckets_of(stage.service), stage.service.sum_s)
    yield from (waiting, busy, workers, items, crashes, dropped, wait, service)


def _admission_families(admission: AdmissionStatistics) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily(
        "staged_pool_admission_inside", "Current use of the engine, by unit", labels=("unit",)
    )
    limit = GaugeMetricFamily("staged_pool_admission_limit", "Maximum use of the engine, by unit", labels=("unit",))
    for unit, value, most in (
        ("requests", admission.requests, admission.max_requests),
        ("items", admission.items, admission.max_items),
        ("tokens", admission.tokens, admission.max_tokens),
        ("body_bytes", admission.body_bytes, admission.max_bytes),
    ):
        in_flight.add_metric((unit,), value)
        limit.add_metric((unit,), most)
    yield from (in_flight, limit)
    yield _counter("admitted", "Requests admitted", admission.admitted)
    yield _counters("refused", "Requests rejected by admission, by limit", "limit", admission.refused)
    yield _gauge(
        "drain_seconds",
        "Predicted seconds until all requests in flight are done, in the slowest lane",
        admission.drain_s,
    )
    yield _gauge("lag_seconds", "Seconds by which recent requests took longer than predicted", admission.lag_s)
    yield _gauge("tenants", "Tenants with requests in flight, summed over priorities", admission.tenants)
    labels = ("lane",)
    tokens = GaugeMetricFamily(
        "staged_pool_lane_tokens", "Tokens in flight in a lane, estimated until tokenized", labels=labels
    )
    drain = GaugeMetricFamily(
        "staged_pool_lane_drain_seconds", "Predicted seconds until a lane is empty", labels=labels
    )
    lag = GaugeMetricFamily("staged_pool_lane_lag_seconds", "Seconds beyond the prediction, by lane", labels=labels)
    for name, lane in admission.lanes.items():
        tokens.add_metric((name,), lane.tokens)
        drain.add_metric((name,), lane.drain_s)
        lag.add_metric((name,), lane.lag_s)
    yield from (tokens, drain, lag)


def _priority_families(priorities: Mapping[str, PriorityStatistics]) -> Iterator[Metric]:
    labels = ("priority",)
    requests = GaugeMetricFamily("staged_pool_priority_requests", "Requests in flight, by priority", labels=labels)
    gate = GaugeMetricFamily(
        "staged_pool_priority_gate_requests", "Requests with inputs that wait for preprocess", labels=labels
    )
    items = GaugeMetricFamily("staged_pool_priority_waiting_items", "Items that wait for the device", labels=labels)
    tokens = GaugeMetricFamily("staged_pool_priority_waiting_tokens", "Tokens that wait for the device", labels=labels)
    wait = HistogramMetricFamily(
        "staged_pool_priority_wait_seconds", "Seconds that items waited for the device", labels=labels
    )
    for name, priority in priorities.items():
        requests.add_metric((name,), priority.requests)
        gate.add_metric((name,), priority.waiting_requests)
        items.add_metric((name,), priority.waiting_items)
        tokens.add_metric((name,), priority.waiting_tokens)
        wait.add_metric((name,), buckets_of(priority.wait), priority.wait.sum_s)
    yield from (requests, gate, items, tokens, wait)


def _device_families(device: DeviceStatistics) -> Iterator[Metric]:
    yield _counters("batches", "Batches by trigger: the reason to start the batch", "trigger", device.batches)
    yield _counters("holds", "Times that a free slot started no batch, by reason", "reason", device.holds)
    budget = GaugeMetricFamily("staged_pool_batch_budget_tokens", "Current token budget of a batch", labels=("lane",))
    for lane, budget_tokens in device.budget_tokens.items():
        budget.add_metric((lane,), budget_tokens)
    yield budget
    yield _counter("device_items", "Items computed on the device", device.items)
    yield _counter("coalesced_items", "Items that reused the row of a coalesced item", device.coalesced_items)
    yield _counter("device_tokens", "Tokens computed on the device, without padding", device.tokens)
    yield _counter("device_padding_tokens", "Padding tokens computed on the device", device.padding_tokens)
    yield _counter("device_tokens_wasted", "Tokens computed for clients that had left", device.wasted_tokens)


def _plugin_families(plugin: PluginStatistics) -> Iterator[Metric]:
    yield _gauge("plugin_open_requests", "Requests of the plugin that are not released yet", plugin.open)
    yield _gauge("plugin_loading_requests", "Requests in the first hooks, or loaded and waiting", plugin.loading)
    running = GaugeMetricFamily("staged_pool_plugin_running_hooks", "Hooks that run, by name", labels=("hook",))
    for hook, count in plugin.running.items():
        running.add_metric((hook,), count)
    yield running
    yield _counters("plugin_cancelled", "Requests whose client left, by the last hook", "hook", plugin.cancelled)
    yield _counters(
        "plugin_blocked_steps", "Steps of hooks that blocked the event loop, by hook", "hook", plugin.blocked
    )
    seconds = HistogramMetricFamily("staged_pool_plugin_hook_seconds", "Seconds of hooks, by name", labels=("hook",))
    for hook, taken in plugin.seconds.items():
        seconds.add_metric((hook,), buckets_of(taken), taken.sum_s)
    yield seconds


def _image_cache_families(cache: ImageCacheStatistics) -> Iterator[Metric]:
    """Yield the metrics of a cache; its hit ratio is hits / (hits + misses)."""
    yield _counter("image_cache_hits", "Images found in the image cache", cache.hits)
    yield _counter("image_cache_misses", "Images not found in the image cache", cache.misses)
    yield _gauge("image_cache_entries", "Images in the image cache", cache.entries)
    yield _gauge("image_cache_bytes", "Bytes in the image cache", cache.bytes)
    yield _gauge("image_cache_limit_bytes", "Maximum bytes of the image cache", cache.max_bytes)


def _result_cache_families(cache: ResultCacheStatistics) -> Iterator[Metric]:
    """Yield the metrics of a cache; its hit ratio is hits / (hits + misses)."""
    yield _counter("result_cache_hits", "Items found in the result cache", cache.hits)
    yield _counter("result_cache_misses", "Items not found in the result cache", cache.misses)
    yield _gauge("result_cache_entries", "Results in the result cache", cache.entries)
    yield _gauge("result_cache_bytes", "Bytes in the result cache", cache.bytes)
    yield _gauge("result_cache_limit_bytes", "Maximum bytes of the result cache", cache.max_bytes)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"staged_pool_{name}", documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"staged_pool_{name}", documentation, value=value)


def _counters(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"staged_pool_{name}", documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
