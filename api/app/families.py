"""Metric families of common shapes, in the types of Prometheus' client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from staged_pool.stages.meter import BUCKETS_S, HistogramSnapshot, SizesSnapshot

_BOUNDS: Final = (*(repr(bound) for bound in BUCKETS_S), "+Inf")


def gauge(name: str, documentation: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(f"staged_pool_{name}", documentation, value=value)


def counter(name: str, documentation: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(f"staged_pool_{name}", documentation, value=value)


def counters(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one label."""
    family = CounterMetricFamily(f"staged_pool_{name}", documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def gauges(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one label."""
    family = GaugeMetricFamily(f"staged_pool_{name}", documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def histograms(
    name: str, documentation: str, label: str, values: Mapping[str, HistogramSnapshot | SizesSnapshot]
) -> HistogramMetricFamily:
    """Return a histogram with one label."""
    family = HistogramMetricFamily(f"staged_pool_{name}", documentation, labels=(label,))
    for key, value in values.items():
        add_histogram(family, (key,), value)
    return family


def histogram(name: str, documentation: str, value: HistogramSnapshot | SizesSnapshot) -> HistogramMetricFamily:
    """Return a histogram without labels."""
    family = HistogramMetricFamily(f"staged_pool_{name}", documentation)
    add_histogram(family, (), value)
    return family


def add_histogram(
    family: HistogramMetricFamily, labels: Iterable[str], value: HistogramSnapshot | SizesSnapshot
) -> None:
    """Add the buckets and the sum of a histogram to its family."""
    if isinstance(value, SizesSnapshot):
        bounds = (*(f"{bound:.12g}" for bound in value.bounds), "+Inf")
        family.add_metric(tuple(labels), list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    else:
        family.add_metric(tuple(labels), buckets_of(value), value.sum_s)


def buckets_of(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Return the cumulative counts of a histogram, by upper bound."""
    return list(zip(_BOUNDS, accumulate(histogram.counts), strict=True))
