"""Metrics of the HTTP side: connections, requests and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily, Metric

from staged_pool.api.app.families import add_histogram, buckets_of, counter, gauge, gauges, histogram, histograms
from staged_pool.api.limits.http_statistics import DurationExemplar, HttpStatistics, RouteStatistics


def http_families(http: HttpStatistics, models: Collection[str]) -> Iterator[Metric]:
    """Yield the metrics of the HTTP side.

    Args:
        http: Its snapshot.
        models: Names of the served models. The series of a model that was removed end with it.
    """
    served = {"", *models}
    yield gauge("connections", "Open connections", http.connections)
    yield gauge("http_requests_running", "HTTP requests in progress", http.requests)
    yield gauge("http_answers_sending", "Answers that are being sent to their clients", http.unread)
    about = "Seconds in which answers were being sent, summed over answers: slow readers take long"
    yield counter("reader_blocked_seconds", about, http.reader_s)
    yield gauge("http_body_bytes", "Bytes of the bodies of HTTP requests in progress", http.body_bytes)
    yield gauge("memory_limit_bytes", "Maximum bytes of memory of the process", http.memory_limit_bytes)
    yield gauge("memory_used_ratio", "Used part of the memory limit, or of a control group's", http.memory_fullness)
    about = "0, or the percentage of used memory whose measures are active"
    yield gauge("memory_pressure", about, http.memory_pressure)
    about = "Connections closed on arrival because of the limit"
    yield counter("connections_refused", about, http.connections_rejected)
    yield counter("connections_evicted", "Connections closed to make room for others", http.connections_evicted)
    yield gauge("live_clients", "Clients of the live events", http.live_clients)
    held = {purpose: held for purpose, (held, _) in http.memory_held.items()}
    yield gauges("memory_held_bytes", "Bytes that requests hold", "purpose", held)
    shares = {purpose: share for purpose, (_, share) in http.memory_held.items()}
    yield gauges("memory_share_bytes", "Maximum bytes that requests may hold", "purpose", shares)
    yield histogram("event_loop_late_seconds", "Event loop lag in seconds, by sample", http.lag)
    yield histograms("gc_pause_seconds", "Seconds of garbage collections, by generation", "generation", http.gc)
    yield from _request_families(http, served)


def _request_families(http: HttpStatistics, served: Collection[str]) -> Iterator[Metric]:
    about = "HTTP requests by route, model and status, and path taken (fast, general); 499 is a client that left"
    requests = CounterMetricFamily(
        "staged_pool_http_requests", about, labels=("route", "model", "status", "path_taken")
    )
    for route, model, status, path_taken, count in http.finished:
        if model not in served:
            continue
        requests.add_metric((route, model, str(status), path_taken), count)
    labels = ("route", "model")
    about = "Seconds from the last byte of the request to the last byte of the answer"
    durations = HistogramMetricFamily("staged_pool_http_request_duration_seconds", about, labels=labels)
    items = HistogramMetricFamily("staged_pool_request_items", "Items of an answered request", labels=labels)
    tokens = HistogramMetricFamily("staged_pool_request_tokens", "Tokens of an answered request", labels=labels)
    sent = CounterMetricFamily("staged_pool_http_response_bytes", "Bytes of the bodies of answers", labels=labels)
    for route, models in http.routes.items():
        for model, counted in models.items():
            if model not in served:
                continue
            durations.add_metric((route, model), _duration_buckets(counted), counted.durations.sum_s)
            sent.add_metric((route, model), counted.answer_bytes)
            if counted.items.count:
                add_histogram(items, (route, model), counted.items)
                add_histogram(tokens, (route, model), counted.tokens)
    yield from (requests, durations, sent, items, tokens)


def _duration_buckets(counted: RouteStatistics) -> Sequence[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the cumulative counts of durations, with the newest traced request of each bucket.

    Only OpenMetrics prints these.
    """
    traced = {each.bucket: each for each in sorted(counted.exemplars, key=lambda each: each.at)}
    return [
        (bound, count) if (each := traced.get(index)) is None else (bound, count, _exemplar(each))
        for index, (bound, count) in enumerate(buckets_of(counted.durations))
    ]


def _exemplar(traced: DurationExemplar) -> Exemplar:
    return Exemplar({"trace_id": traced.trace_id}, traced.seconds, traced.at)
