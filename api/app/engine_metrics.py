"""Metrics of one engine, made of its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from staged_pool.api.app.families import counter, counters, gauge, gauges, histogram, histograms
from staged_pool.runtime.statistics import (
    FETCH_OUTCOMES,
    REJECTION_REASONS,
    AdmissionStatistics,
    BatchSizes,
    DeviceStatistics,
    EngineStatistics,
    ImageCacheStatistics,
    PluginStatistics,
    PriorityStatistics,
    ResultCacheStatistics,
)
from staged_pool.stages.errors import ADMISSION
from staged_pool.stages.meter import StageStatistics
from staged_pool.stages.scheduling.entries import BatchTrigger


def engine_families(statistics: EngineStatistics) -> Iterator[Metric]:
    """Yield the metrics of one engine, without the label of its model.

    A counter whose labels are known stands at 0 from the start: otherwise the first event would be no increase.
    """
    yield _model_family(statistics)
    yield gauge(
        "model_load_seconds", "Seconds from the first byte read to the end of the warm-up", statistics.model.load_s
    )
    about = "Seconds of answered requests, from admission to the answer"
    yield histogram("request_duration_seconds", about, statistics.answered)
    yield from _stage_families(statistics.stages)
    yield from _admission_families(statistics.admission)
    yield from _priority_families(statistics.priorities)
    yield from device_families(statistics.device)
    places = dict.fromkeys((ADMISSION, "fetch", *(stage.name for stage in statistics.stages)), 0)
    yield counters("cancelled", "Requests whose client left, by stage", "stage", {**places, **statistics.cancelled})
    yield counters("expired", "Requests whose deadline passed, by stage", "stage", {**places, **statistics.expired})
    yield gauge("stalled", "1 while a forward runs far longer than predicted", statistics.stall is not None)
    overdue = statistics.overdue_preprocess_calls
    yield gauge("preprocess_overdue_calls", "Preprocess calls that run longer than preprocess_alarm_s", overdue)
    yield from _limiter_families(statistics)
    if statistics.image_cache is not None:
        yield from _image_cache_families(statistics.image_cache)
    if statistics.result_cache is not None:
        yield from _result_cache_families(statistics.result_cache)
    if statistics.plugin is not None:
        yield from _plugin_families(statistics.plugin)


def _model_family(statistics: EngineStatistics) -> Metric:
    info = GaugeMetricFamily(
        "staged_pool_model_info", "1 for each served model, with its data type and device", labels=("dtype", "device")
    )
    info.add_metric((statistics.model.dtype, statistics.model.device), 1)
    return info


_STAGE_GAUGES: Final = (
    ("stage_waiting_items", "Items that wait for the stage", attrgetter("waiting")),
    ("stage_busy_workers", "Workers that process items", attrgetter("busy")),
    ("stage_blocked_workers", "Workers that wait for the stage behind", attrgetter("blocked")),
    ("stage_workers", "Workers of the stage", attrgetter("workers")),
    ("stage_channel_fullness", "Used part of the channel in front of the stage, 0 to 1", attrgetter("fullness")),
    (
        "stage_oldest_seconds",
        "Seconds since the last progress of the request that has made none for longest",
        attrgetter("oldest_s"),
    ),
)

_STAGE_COUNTERS: Final = (
    ("stage_items", "Items that the stage has finished", attrgetter("done")),
    ("stage_crashes", "Crashes of workers", attrgetter("crashes")),
    ("stage_busy_seconds", "Seconds in which workers processed items, summed over workers", attrgetter("busy_s")),
    (
        "stage_blocked_seconds",
        "Seconds in which workers waited for the stage behind, summed over workers",
        attrgetter("blocked_s"),
    ),
)

_STAGE_HISTOGRAMS: Final = (
    ("stage_wait_seconds", "Seconds that items waited for the stage", attrgetter("wait")),
    ("stage_service_seconds", "Seconds that workers processed items", attrgetter("service")),
)


def _stage_families(stages: Sequence[StageStatistics]) -> Iterator[Metric]:
    for name, about, value_of in _STAGE_GAUGES:
        yield gauges(name, about, "stage", {stage.name: value_of(stage) for stage in stages})
    for name, about, value_of in _STAGE_COUNTERS:
        yield counters(name, about, "stage", {stage.name: value_of(stage) for stage in stages})
    for name, about, value_of in _STAGE_HISTOGRAMS:
        yield histograms(name, about, "stage", {stage.name: value_of(stage) for stage in stages})
    dropped = CounterMetricFamily(
        "staged_pool_stage_dropped", "Items that ended in the stage", labels=("stage", "cause")
    )
    for stage in stages:
        for cause, count in stage.dropped.items():
            dropped.add_metric((stage.name, cause), count)
    yield dropped


def _admission_families(admission: AdmissionStatistics) -> Iterator[Metric]:
    in_flight = {
        "requests": (admission.requests, admission.max_requests),
        "items": (admission.items, admission.max_items),
        "tokens": (admission.tokens, admission.max_tokens),
        "body_bytes": (admission.body_bytes, admission.max_bytes),
    }
    used = {unit: value for unit, (value, _) in in_flight.items()}
    yield gauges("admission_inside", "Current use of the engine, by unit", "unit", used)
    limits = {unit: limit for unit, (_, limit) in in_flight.items()}
    yield gauges("admission_limit", "Maximum use of the engine, by unit", "unit", limits)
    yield counter("admitted", "Requests admitted", admission.admitted)
    refused = {**dict.fromkeys(REJECTION_REASONS, 0), **admission.refused}
    yield counters("refused", "Requests rejected by admission, by reason", "reason", refused)
    yield histogram("retry_after_seconds", "Seconds after which rejected requests may retry", admission.retry_after)
    yield gauge("tenants", "Tenants with requests in flight, summed over priorities", admission.tenants)
    lanes = admission.lanes
    about = "Tokens in flight in a lane, estimated until tokenized"
    yield gauges("lane_tokens", about, "lane", {name: lane.tokens for name, lane in lanes.items()})
    about = "Predicted seconds until a lane is empty"
    yield gauges("lane_drain_seconds", about, "lane", {name: lane.drain_s for name, lane in lanes.items()})
    about = "Seconds by which recent requests took longer than predicted, by lane"
    yield gauges("lane_lag_seconds", about, "lane", {name: lane.lag_s for name, lane in lanes.items()})


_PRIORITY_GAUGES: Final = (
    ("priority_requests", "Requests in flight, by priority", attrgetter("requests")),
    ("priority_gate_requests", "Requests with inputs that wait for preprocess", attrgetter("waiting_requests")),
    ("priority_waiting_items", "Items that wait for the device", attrgetter("waiting_items")),
    ("priority_waiting_tokens", "Tokens that wait for the device", attrgetter("waiting_tokens")),
)


def _priority_families(priorities: Mapping[str, PriorityStatistics]) -> Iterator[Metric]:
    for name, about, value_of in _PRIORITY_GAUGES:
        values = {priority: value_of(statistics) for priority, statistics in priorities.items()}
        yield gauges(name, about, "priority", values)
    waits = {name: priority.wait for name, priority in priorities.items()}
    yield histograms("priority_wait_seconds", "Seconds that items waited for the device", "priority", waits)


def device_families(device: DeviceStatistics) -> Iterator[Metric]:
    """Yield the metrics of a device."""
    batches: dict[str, int] = {**dict.fromkeys(BatchTrigger, 0), **device.batches}
    yield counters("batches", "Batches by trigger: the reason to start the batch", "trigger", batches)
    holds = {**dict.fromkeys(("cores", "coming", "empty"), 0), **device.holds}
    yield counters("holds", "Times that a free slot started no batch, by reason", "reason", holds)
    about = "Seconds that a free slot started no batch although items waited, by reason"
    yield counters("batch_hold_seconds", about, "reason", device.hold_s)
    yield from _size_families(device.sizes)
    yield gauges("batch_budget_tokens", "Current token budget of a batch", "lane", device.budget_tokens)
    yield counter("device_items", "Items computed on the device", device.items)
    yield counter("coalesced_items", "Items that reused the row of a coalesced item", device.coalesced_items)
    yield counter("device_tokens", "Tokens computed on the device, without padding", device.tokens)
    yield counter("device_padding_tokens", "Padding tokens computed on the device", device.padding_tokens)
    yield counter("device_tokens_wasted", "Tokens computed for clients that had left", device.wasted_tokens)
    yield gauge("device_running_seconds", "Seconds for which the oldest forward has run", device.running_s)
    about = "Seconds in which the device had at least one forward"
    yield counters("device_busy_seconds", about, "device", {each.device: each.busy_s for each in device.devices})


def _size_families(sizes: Mapping[str, BatchSizes]) -> Iterator[Metric]:
    yield histograms("batch_items", "Items of a batch", "lane", {lane: each.items for lane, each in sizes.items()})
    about = "Tokens of a batch, with padding"
    yield histograms("batch_tokens", about, "lane", {lane: each.tokens for lane, each in sizes.items()})
    about = "Used part of the token budget of a batch"
    yield histograms("batch_fill_ratio", about, "lane", {lane: each.fill for lane, each in sizes.items()})


def _limiter_families(statistics: EngineStatistics) -> Iterator[Metric]:
    limiters = statistics.limiters
    about = "Calls that use the limiter"
    yield gauges("limiter_used", about, "limiter", {name: each.used for name, each in limiters.items()})
    about = "Most calls at once"
    yield gauges("limiter_slots", about, "limiter", {name: each.slots for name, each in limiters.items()})
    about = "Calls that wait for the limiter"
    yield gauges("limiter_waiting", about, "limiter", {name: each.waiting for name, each in limiters.items()})
    fetches = {outcome: statistics.fetches[outcome] for outcome in FETCH_OUTCOMES if outcome in statistics.fetches}
    yield histograms("fetch_duration_seconds", "Seconds of fetches of images, with their waits", "outcome", fetches)


def _plugin_families(plugin: PluginStatistics) -> Iterator[Metric]:
    yield gauge("plugin_open_requests", "Requests of the plugin that are not released yet", plugin.open)
    yield gauge("plugin_loading_requests", "Requests in the first hooks, or loaded and waiting", plugin.loading)
    yield gauges("plugin_running_hooks", "Hooks that run, by name", "hook", plugin.running)
    yield counters("plugin_cancelled", "Requests whose client left, by the last hook", "hook", plugin.cancelled)
    about = "Steps of hooks that blocked the event loop, by hook"
    yield counters("plugin_blocked_steps", about, "hook", plugin.blocked)
    yield histograms("plugin_hook_seconds", "Seconds of hooks, by name", "hook", plugin.seconds)


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
