"""Metrics of one engine, made of its statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from staged_pool.api.app.pipeline_metrics import buckets_of
from staged_pool.runtime.statistics import (
    AdmissionStatistics,
    DeviceStatistics,
    EngineStatistics,
    ImageCacheStatistics,
    PluginStatistics,
    PriorityStatistics,
    ResultCacheStatistics,
)
from staged_pool.stages.meter import StageStatistics


def engine_families(statistics: EngineStatistics) -> Iterator[Metric]:
    """Yield the metrics of one engine, without the label of its model."""
    yield from _stage_families(statistics.stages)
    yield from _admission_families(statistics.admission)
    yield from _priority_families(statistics.priorities)
    yield from device_families(statistics.device)
    yield counters("cancelled", "Requests whose client left, by stage", "stage", statistics.cancelled)
    yield counters("expired", "Requests whose deadline passed, by stage", "stage", statistics.expired)
    yield gauge("stalled", "1 while a forward runs far longer than predicted", statistics.stall is not None)
    overdue = statistics.overdue_preprocess_calls
    yield gauge("preprocess_overdue_calls", "Preprocess calls that run longer than preprocess_alarm_s", overdue)
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
    yield counter("admitted", "Requests admitted", admission.admitted)
    yield counters("refused", "Requests rejected by admission, by limit", "limit", admission.refused)
    yield gauge(
        "drain_seconds",
        "Predicted seconds until all requests in flight are done, in the slowest lane",
        admission.drain_s,
    )
    yield gauge("lag_seconds", "Seconds by which recent requests took longer than predicted", admission.lag_s)
    yield gauge("tenants", "Tenants with requests in flight, summed over priorities", admission.tenants)
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


def device_families(device: DeviceStatistics) -> Iterator[Metric]:
    """Yield the metrics of a device."""
    yield counters("batches", "Batches by trigger: the reason to start the batch", "trigger", device.batches)
    yield counters("holds", "Times that a free slot started no batch, by reason", "reason", device.holds)
    budget = GaugeMetricFamily("staged_pool_batch_budget_tokens", "Current token budget of a batch", labels=("lane",))
    for lane, budget_tokens in device.budget_tokens.items():
        budget.add_metric((lane,), budget_tokens)
    yield budget
    yield counter("device_items", "Items computed on the device", device.items)
    yield counter("coalesced_items", "Items that reused the row of a coalesced item", device.coalesced_items)
    yield counter("device_tokens", "Tokens computed on the device, without padding", device.tokens)
    yield counter("device_padding_tokens", "Padding tokens computed on the device", device.padding_tokens)
    yield counter("device_tokens_wasted", "Tokens computed for clients that had left", device.wasted_tokens)


def _plugin_families(plugin: PluginStatistics) -> Iterator[Metric]:
    yield gauge("plugin_open_requests", "Requests of the plugin that are not released yet", plugin.open)
    yield gauge("plugin_loading_requests", "Requests in the first hooks, or loaded and waiting", plugin.loading)
    running = GaugeMetricFamily("staged_pool_plugin_running_hooks", "Hooks that run, by name", labels=("hook",))
    for hook, count in plugin.running.items():
        running.add_metric((hook,), count)
    yield running
    yield counters("plugin_cancelled", "Requests whose client left, by the last hook", "hook", plugin.cancelled)
    yield counters(
        "plugin_blocked_steps", "Steps of hooks that blocked the event loop, by hook", "hook", plugin.blocked
    )
    seconds = HistogramMetricFamily("staged_pool_plugin_hook_seconds", "Seconds of hooks, by name", labels=("hook",))
    for hook, taken in plugin.seconds.items():
        seconds.add_metric((hook,), buckets_of(taken), taken.sum_s)
    yield seconds


def _image_cache_families(cache: ImageCacheStatistics) -> Iterator[Metric]:
    """Yield the metrics of a cache; its hit ratio is hits / (hits + misses)."""
    yield counter("image_cache_hits", "Images found in the image cache", cache.hits)
    yield counter("image_cache_misses", "Images not found in the image cache", cache.misses)
    yield gauge("image_cache_entries", "Images in the image cache", cache.entries)
    yield gauge("image_cache_bytes", "Bytes in the image cache", cache.bytes)
    yield gauge("image_cache_limit_bytes", "Maximum bytes of the image cache", cache.max_bytes)


def _result_cache_families(cache: ResultCacheStatistics) -> Iterator[Metric]:
    """Yield the metrics of a cache; its hit ratio is hits / (hits + misses)."""
    yield counter("result_cache_hits", "Items found in the result cache", cache.hits)
    yield counter("result_cache_misses", "Items not found in the result cache", cache.misses)
    yield gauge("result_cache_entries", "Results in the result cache", cache.entries)
    yield gauge("result_cache_bytes", "Bytes in the result cache", cache.bytes)
    yield gauge("result_cache_limit_bytes", "Maximum bytes of the result cache", cache.max_bytes)


def gauge(name: str, documentation: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(f"staged_pool_{name}", documentation, value=value)


def counter(name: str, documentation: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(f"staged_pool_{name}", documentation, value=value)


def counters(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    """Return a counter with one label."""
    family = CounterMetricFamily(f"staged_pool_{name}", documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
