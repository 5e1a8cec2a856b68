"""Metrics of the HTTP side: connections, requests and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from staged_pool.api.app.http_statistics import HttpStatistics
from staged_pool.api.app.pipeline_metrics import buckets_of


class HttpCollector(Collector):
    """Converts a snapshot of the HTTP side to metric families on each scrape.

    Args:
        http: Returns the snapshot.
    """

    def __init__(self, http: Callable[[], HttpStatistics]) -> None:
        self._http = http

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        http = self._http()
        for name, about, value in (
            ("connections", "Open connections", http.connections),
            ("http_requests_running", "HTTP requests in progress", http.requests),
            ("http_body_bytes", "Bytes of the bodies of HTTP requests in progress", http.body_bytes),
            ("memory_limit_bytes", "Maximum bytes of memory of the process", http.memory_limit_bytes),
            ("memory_used_ratio", "Used part of the memory limit, or of a control group's", http.memory_fullness),
            (
                "memory_pressure",
                "0, or the percentage of used memory whose measures are active",
                http.memory_pressure,
            ),
        ):
            yield GaugeMetricFamily(f"staged_pool_{name}", about, value=value)
        yield CounterMetricFamily(
            "staged_pool_connections_refused",
            "Connections closed on arrival because of the limit",
            value=http.connections_rejected,
        )
        yield CounterMetricFamily(
            "staged_pool_connections_evicted",
            "Connections closed to make room for others",
            value=http.connections_evicted,
        )
        yield from _memory_families(http)
        late = HistogramMetricFamily("staged_pool_event_loop_late_seconds", "Event loop lag in seconds, by sample")
        late.add_metric((), buckets_of(http.lag), http.lag.sum_s)
        yield late
        yield from _request_families(http)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: Prometheus' client would otherwise collect at registration."""
        return ()


def _memory_families(http: HttpStatistics) -> Iterator[Metric]:
    labels = ("purpose",)
    held = GaugeMetricFamily("staged_pool_memory_held_bytes", "Bytes that requests hold", labels=labels)
    most = GaugeMetricFamily("staged_pool_memory_share_bytes", "Maximum bytes that requests may hold", labels=labels)
    for purpose, (held_bytes, limit_bytes) in http.memory_held.items():
        held.add_metric((purpose,), held_bytes)
        most.add_metric((purpose,), limit_bytes)
    yield from (held, most)


def _request_families(http: HttpStatistics) -> Iterator[Metric]:
    about = "HTTP requests by route and status, and path taken (fast, general); 499 is a client that left"
    requests = CounterMetricFamily("staged_pool_http_requests", about, labels=("route", "status", "path_taken"))
    for route, status, path_taken, count in http.finished:
        requests.add_metric((route, str(status), path_taken), count)
    about = "Seconds from the last byte of the request to the last byte of the answer"
    durations = HistogramMetricFamily("staged_pool_http_request_duration_seconds", about, labels=("route",))
    for route, taken in http.durations.items():
        durations.add_metric((route,), buckets_of(taken), taken.sum_s)
    yield from (requests, durations)
