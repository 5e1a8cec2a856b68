"""Finished requests: each is counted, logged and traced here."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from staged_pool.api.app.call import PATH_TAKEN, Answer, Call, priority_of
from staged_pool.api.app.routes import PROBE_PATHS
from staged_pool.api.app.sampling import Sample
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import TENANT
from staged_pool.api.limits.http_statistics import HttpMeter
from staged_pool.api.tracing.trace_context import written
from staged_pool.api.tracing.tracer import FinishedRequest, Tracer
from staged_pool.stages.errors import shortened
from staged_pool.stages.log import get_logger
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline

REJECTIONS_LOGGED_EVERY_S: Final = 1.0
"""Seconds between two logged rejections of one status: 429 for overload, 401 for a missing key.

Rejections must be cheap. Each line says how many rejections before it were not logged.
"""

log = get_logger("staged_pool.api")


class FinishedRequests:
    """Counts, logs and traces the requests of one server.

    Args:
        meter: Counts them.
        config: Settings of the log.
        paths: All paths of the server. Only these are labels, names or attributes.
        tracer: Writes spans. None: traces are off.
    """

    def __init__(self, meter: HttpMeter, config: ServerConfig, paths: Collection[str], tracer: Tracer | None) -> None:
        self._meter = meter
        self._config = config
        self._paths = paths
        self._tracer = tracer
        self._samples = {status: Sample(every_s=REJECTIONS_LOGGED_EVERY_S) for status in (401, 429)}

    def begins(self, call: Call) -> None:
        """Decide if a request is traced. Probes never are."""
        if self._tracer is not None and call.scope["path"] not in PROBE_PATHS:
            call.trace = self._tracer.start(call.headers)

    def ends(self, call: Call, outcome: Answer, seconds: float) -> None:
        """Count, log and trace a request that has ended.

        Args:
            call: The request.
            outcome: Its answer; status 499 if its client left.
            seconds: Its duration.
        """
        ended_at = time.perf_counter()
        path = call.scope["path"]
        route = call.route or (path if path in self._paths else "other")
        lines_bytes = 0 if call.lines is None else call.lines.sent_bytes
        answer_bytes = lines_bytes or outcome.size
        self._meter.finished(
            route,
            call.model or "",
            outcome.status,
            call.scope.get(PATH_TAKEN, "general"),
            seconds=seconds,
            answer_bytes=answer_bytes,
            timeline=call.timeline,
            trace_id=None if call.trace is None else written(call.trace.trace_id),
        )
        if self._tracer is not None and call.trace is not None:
            self._tracer.finish(call.trace, _finished(call, route, outcome, (ended_at - seconds, ended_at)))
        left_out, sample = 0, self._samples.get(outcome.status)
        if not self._config.access_log or (sample is not None and (left_out := sample.count()) < 0):
            return
        fields = self._fields(call, outcome, answer_bytes)
        if left_out:
            fields["rejections_left_out"] = left_out
        fields |= {"total_ms": round(seconds * 1e3, 3), "request_id": call.request_id}
        if (trace_id := call.trace_id) is not None:
            fields["trace_id"] = trace_id
        (log.debug if path in PROBE_PATHS else log.info)("request.finished", **fields)

    def _fields(self, call: Call, outcome: Answer, answer_bytes: int) -> dict[str, object]:
        path = call.scope["path"]
        fields: dict[str, object] = {
            "method": call.scope["method"],
            "path": path if path in self._paths else shortened(path),
            "status": outcome.status,
            "path_taken": call.scope.get(PATH_TAKEN, "general"),
        }
        if outcome.word is not None:
            fields["error"] = outcome.word
        if outcome.reason is not None:
            fields["reason"] = outcome.reason
        if call.body_bytes is not None:
            fields["body_bytes"] = call.body_bytes
        fields["answer_bytes"] = answer_bytes
        if call.model is not None:
            fields["model"] = call.model
        if TENANT in call.scope:
            fields["tenant"] = call.scope[TENANT]
        if self._config.log_clients and call.scope.get("client"):
            fields["client"] = call.scope["client"][0]
        if call.timeline is not None:
            fields |= {"items": call.timeline.items, "tokens": call.timeline.tokens}
            if call.timeline.images:
                fields["images"] = call.timeline.images
            if priority_of(call.headers) is Priority.BULK:
                fields["priority"] = Priority.BULK.value
            fields |= {f"{name}_ms": ms for name, ms in call.times_ms or milliseconds(call.timeline)}
        return fields


def _finished(call: Call, route: str, outcome: Answer, times: tuple[float, float]) -> FinishedRequest:
    """Return what the span of a request says."""
    operation, timeline = call.operation, call.timeline or Timeline()
    if operation is None and (task := TASKS.get(route)) is not None:  # it was rejected before its handler ran
        operation = task.operation
    priority = None if operation is None else priority_of(call.headers)
    return FinishedRequest(
        operation=operation,
        route=route,
        method=call.scope["method"],
        status=outcome.status,
        error=outcome.word,
        times=times,
        items=timeline.items,
        tokens=timeline.tokens,
        priority=None if priority is None else priority.value,
    )


def milliseconds(timeline: Timeline) -> list[tuple[str, float]]:
    """Return the milliseconds of a request in each stage, for its headers and the log."""
    times = [
        ("parse", timeline.parse_s),
        ("preprocess", timeline.preprocess_s),
        ("queue", timeline.queue_s),
        ("device", timeline.device_s),
        ("postprocess", timeline.postprocess_s),
    ]
    times += [(f"hook_{name}", seconds) for name, seconds in timeline.hooks.items()]
    if timeline.fetch_s:
        times.insert(0, ("fetch", timeline.fetch_s))
    return [(name, round(seconds * 1e3, 3)) for name, seconds in times]
