"""Metrics of pipelines and of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from staged_pool.api.app.families import buckets_of
from staged_pool.runtime.pipelines.statistics import PipelineStatistics

_PIPELINE = ("pipeline",)
_STAGE = ("pipeline", "stage")


class PipelineCollector(Collector):
    """Converts the snapshots of pipelines to metric families on each scrape.

    Args:
        statistics: Returns a snapshot of each pipeline by its name.
    """

    def __init__(self, statistics: Callable[[], Mapping[str, PipelineStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the families; none if there is no pipeline."""
        if pipelines := self._statistics():
            yield from _families(pipelines)
            yield from _stage_families(pipelines)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: Prometheus' client would otherwise collect at registration."""
        return ()


def _families(pipelines: Mapping[str, PipelineStatistics]) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily("staged_pool_pipeline_requests", "Requests in flight", labels=_PIPELINE)
    items = GaugeMetricFamily("staged_pool_pipeline_items", "Items in flight", labels=_PIPELINE)
    waiting = GaugeMetricFamily("staged_pool_pipeline_waiting_items", "Items that wait for a place", labels=_PIPELINE)
    left = GaugeMetricFamily(
        "staged_pool_pipeline_left_calls", "Calls of functions that outlast their requests", labels=_PIPELINE
    )
    outcomes = CounterMetricFamily(
        "staged_pool_pipeline_outcomes", "Requests that ended, by outcome", labels=("pipeline", "outcome")
    )
    for name, statistics in pipelines.items():
        in_flight.add_metric((name,), statistics.requests)
        items.add_metric((name,), statistics.in_flight)
        waiting.add_metric((name,), statistics.waiting)
        left.add_metric((name,), statistics.left)
        for outcome, count in statistics.outcomes.items():
            outcomes.add_metric((name, outcome), count)
    yield from (in_flight, items, waiting, left, outcomes)


def _stage_families(pipelines: Mapping[str, PipelineStatistics]) -> Iterator[Metric]:
    prefix = "staged_pool_pipeline_stage"
    in_flight = GaugeMetricFamily(f"{prefix}_items", "Items in the stage", labels=_STAGE)
    waiting = GaugeMetricFamily(f"{prefix}_waiting_items", "Items that wait for a place in the stage", labels=_STAGE)
    ended = CounterMetricFamily(f"{prefix}_ended", "Items that the stage has ended with", labels=(*_STAGE, "outcome"))
    wait = HistogramMetricFamily(f"{prefix}_wait_seconds", "Seconds that items waited for a place", labels=_STAGE)
    service = HistogramMetricFamily(f"{prefix}_service_seconds", "Seconds of items in the stage", labels=_STAGE)
    for name, statistics in pipelines.items():
        for stage in statistics.stages:
            labels = (name, stage.name)
            in_flight.add_metric(labels, stage.in_flight)
            waiting.add_metric(labels, stage.waiting)
            for outcome, count in (("done", stage.done), ("skipped", stage.skipped), ("failed", stage.failed)):
                ended.add_metric((*labels, outcome), count)
            wait.add_metric(labels, buckets_of(stage.wait), stage.wait.sum_s)
            service.add_metric(labels, buckets_of(stage.service), stage.service.sum_s)
    yield from (in_flight, waiting, ended, wait, service)
