"""Snapshots of processes, and their sums."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, TypeVar, cast

from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics

T = TypeVar("T")

_COUNTERS: Final = frozenset({
    "AdmissionStatistics.admitted", "AdmissionStatistics.refused", "DeviceStatistics.batches",
    "DeviceStatistics.coalesced_items", "DeviceStatistics.hold_s", "DeviceStatistics.holds", "DeviceStatistics.items",
    "DeviceStatistics.padding_tokens", "DeviceStatistics.tokens", "DeviceStatistics.wasted_tokens",
    "EngineStatistics.cancelled", "EngineStatistics.expired", "HistogramSnapshot.counts", "HistogramSnapshot.sum_s",
    "HttpStatistics.connections_evicted", "HttpStatistics.connections_rejected", "HttpStatistics.finished",
    "ImageCacheStatistics.hits", "ImageCacheStatistics.misses", "LaneStatistics.rejected",
    "PipelineStageStatistics.done",
    "PipelineStageStatistics.failed", "PipelineStageStatistics.skipped", "PipelineStatistics.outcomes",
    "HttpStatistics.reader_s", "RouteStatistics.answer_bytes", "ReplicaStatistics.batches", "ReplicaStatistics.busy_s",
    "ReplicaStatistics.tokens", "ResultCacheStatistics.hits", "ResultCacheStatistics.misses", "SizesSnapshot.counts",
    "SizesSnapshot.sum", "StageStatistics.blocked_s", "StageStatistics.busy_s", "StageStatistics.crashes",
    "StageStatistics.done", "StageStatistics.dropped", "Snapshot.cpu_s",
})  # fmt: skip
"""Numbers that only grow. They outlive their process; all other numbers end with it."""

_EXEMPLARS: Final = "RouteStatistics.exemplars"
"""Newest requests, which end with their process."""

_LARGEST: Final = frozenset({
    "AdmissionStatistics.bytes_per_token", "AdmissionStatistics.drain_s", "AdmissionStatistics.lag_s",
    "AdmissionStatistics.target_delay_s", "DeviceStatistics.running_s", "HttpStatistics.memory_fullness",
    "HttpStatistics.memory_pressure", "LaneStatistics.headroom_s", "ModelFacts.load_s", "ModelFacts.width",
    "PipelineStatistics.drain_s",
    "StageStatistics.fullness", "StageStatistics.oldest_s",
})  # fmt: skip
"""Numbers whose sum says nothing: the largest one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The work of one process at one moment."""

    engines: Mapping[str, EngineStatistics]
    loads: Mapping[str, EngineLoad]
    """Load of each model; only the engine process has them."""
    pipelines: Mapping[str, PipelineStatistics]
    http: HttpStatistics | None
    """None: the process has no HTTP side."""
    cpu_s: float
    """CPU time of the process so far, in seconds."""
    peak_bytes: int
    """Largest resident memory of the process so far."""


def snapshot(
    engines: Mapping[str, EngineStatistics],
    *,
    loads: Mapping[str, EngineLoad] | None = None,
    pipelines: Mapping[str, PipelineStatistics] | None = None,
    http: HttpStatistics | None = None,
) -> Snapshot:
    """Take the snapshot of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Snapshot(
        engines=engines,
        loads=loads or {},
        pipelines=pipelines or {},
        http=http,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def total(parts: Iterable[T]) -> T:
    """Add up statistics of one type, at least one. Texts and settings are those of the first."""
    return reduce(_sum, parts)


def counters(statistics: T) -> T:
    """Return the counters alone: they outlive a process."""
    return cast(T, _map(statistics, "", lambda number, name: number if name in _COUNTERS else type(number)()))


def _sum(one: T, other: T, name: str = "") -> T:
    return cast(T, _summed(one, other, name))


def _summed(one: Any, other: Any, name: str) -> Any:
    """Add two values of one field; `name` is that of the field, with its class."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, bool | str):
        return one
    if isinstance(one, int | float):
        return max(one, other) if name in _LARGEST else one + other
    if isinstance(one, Mapping):
        return {key: _summed(one.get(key), other.get(key), name) for key in {**one, **other}}
    if isinstance(one, tuple):
        return _summed_tuple(one, other, name)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        cls = type(one).__name__
        return dataclasses.replace(
            one,
            **{
                field.name: _summed(getattr(one, field.name), getattr(other, field.name), f"{cls}.{field.name}")
                for field in dataclasses.fields(one)
            },
        )
    raise TypeError(f"{name}: values of {type(one).__name__} have no sum")


def _summed_tuple(one: tuple[Any, ...], other: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if name == "HttpStatistics.finished":
        counts: dict[tuple[Any, ...], int] = {}
        for *key, count in (*one, *other):
            counts[tuple(key)] = counts.get(tuple(key), 0) + count
        return tuple((*key, count) for key, count in counts.items())
    if one and hasattr(one[0], "name"):  # stages, which have names
        named = {each.name: each for each in other}
        return (
            *(_summed(each, named.pop(each.name, None), name) for each in one),
            *named.values(),
        )
    if name == "SizesSnapshot.bounds":
        return one
    if name == _EXEMPLARS:
        newest = {each.bucket: each for each in sorted((*one, *other), key=lambda each: each.at)}
        return tuple(newest.values())
    if name.endswith("memory_held") or name in ("HistogramSnapshot.counts", "SizesSnapshot.counts"):
        return tuple(_summed(first, second, name) for first, second in zip(one, other, strict=True))
    return one + other


def _map(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Change all numbers of a value, given the names of their fields."""
    if isinstance(value, bool | str) or value is None or name == "SizesSnapshot.bounds":
        return value
    if isinstance(value, int | float):
        return change(value, name)
    if isinstance(value, Mapping):
        return {key: _map(each, name, change) for key, each in value.items()}
    if isinstance(value, tuple):
        return () if name == _EXEMPLARS else tuple(_map(each, name, change) for each in value)
    cls = type(value).__name__
    return dataclasses.replace(
        value,
        **{
            field.name: _map(getattr(value, field.name), f"{cls}.{field.name}", change)
            for field in dataclasses.fields(value)
        },
    )
