"""Spans of requests, stages and batches, written to OpenTelemetry's SDK after they have ended.

Only `opening.py` imports this module, and only if traces are on: it needs OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from staged_pool.api.tracing.tracer import FinishedRequest, RequestTrace
from staged_pool.stages.trace import TracedBatch

PROVIDER: Final = "staged_pool"
"""Value of `gen_ai.provider.name`."""

MAX_LINKS: Final = 32
"""Most links of a batch to its requests."""

STAGES: Final = ("fetch", "parse", "preprocess", "queue", "device", "postprocess")
"""Names of the spans below a request's, in their usual order."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "QUERY"})
_OTHER_METHOD: Final = "_OTHER"
"""Value of `http.request.method` for a method that is not known: a client may send any."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class PresetIds(RandomIdGenerator):
    """Random ids, but for the one span whose ids were chosen before it was written."""

    def __init__(self) -> None:
        self.preset: tuple[int, int] | None = None
        """Ids of the trace and the span that is written next. None: they are random."""

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.preset is None else self.preset[0]

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.preset is None else self.preset[1]


class OtelSpans:
    """Writes spans that have ended. It belongs to one event loop.

    Args:
        tracer: Tracer of the SDK, which samples each span.
        ids: Source of its ids.
    """

    def __init__(self, tracer: Tracer, ids: PresetIds) -> None:
        self._tracer = tracer
        self._ids = ids

    def request(self, trace: RequestTrace, finished: FinishedRequest) -> None:
        """Write the spans of a request that has ended, and of its stages."""
        offset_ns = _clock_offset_ns()
        began_ns, ended_ns = (int(at * 1e9) + offset_ns for at in finished.times)
        self._ids.preset = trace.trace_id, trace.span_id
        span = self._tracer.start_span(
            _name(trace, finished),
            _context(trace),
            SpanKind.SERVER,
            _attributes(trace, finished),
            start_time=began_ns,
        )
        self._ids.preset = None
        if finished.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, Context())
        items = {"staged_pool.items": finished.items} if finished.items else {}
        for stage, times in _in_order(trace.times):
            first_ns, last_ns = (int(at * 1e9) + offset_ns for at in times)
            child = self._tracer.start_span(stage, inside, attributes=items, start_time=first_ns)
            child.end(last_ns)
        span.end(ended_ns)

    def batch(self, batch: TracedBatch) -> None:
        """Write the span of a batch that has ended: a root, with links to its requests."""
        offset_ns = _clock_offset_ns()
        attributes: dict[str, AttributeValue] = {
            "staged_pool.lane": batch.lane,
            "staged_pool.items": batch.items,
            "staged_pool.tokens": batch.tokens,
            "staged_pool.trigger": batch.trigger,
        }
        if model := batch.traces[0].model:
            attributes["gen_ai.response.model"] = model
        span = self._tracer.start_span(
            f"batch {batch.lane}",
            Context(),
            SpanKind.INTERNAL,
            attributes,
            _links(batch),
            start_time=int(batch.began_at * 1e9) + offset_ns,
        )
        span.end(int(batch.ended_at * 1e9) + offset_ns)


def _clock_offset_ns() -> int:
    """Return the nanoseconds from the clock of the stages to the time since 1970."""
    return time.time_ns() - time.perf_counter_ns()


def _in_order(times: Mapping[str, tuple[float, float]]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Give stages of engines in their usual order, then those of pipelines as they began."""
    for stage in (*STAGES, *sorted(times.keys() - STAGES, key=lambda stage: times[stage])):
        if stage in times:
            yield stage, times[stage]


def _name(trace: RequestTrace, finished: FinishedRequest) -> str:
    if finished.operation is None:
        return f"{_method(finished)} {finished.route}"
    return f"{finished.operation} {trace.model}".rstrip()


def _method(finished: FinishedRequest) -> str:
    return finished.method if finished.method in _METHODS else _OTHER_METHOD


def _attributes(trace: RequestTrace, finished: FinishedRequest) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        HTTP_REQUEST_METHOD: _method(finished),
        HTTP_ROUTE: finished.route,
        HTTP_RESPONSE_STATUS_CODE: finished.status,
    }
    if finished.operation is not None:
        found |= {"gen_ai.operation.name": finished.operation, "gen_ai.provider.name": PROVIDER}
    if trace.model:
        found |= {"gen_ai.request.model": trace.model, "gen_ai.response.model": trace.model}
    if finished.items:
        found |= {"staged_pool.items": finished.items}
    if finished.tokens:
        found |= {"gen_ai.usage.input_tokens": finished.tokens}
    if finished.priority is not None:
        found |= {"staged_pool.priority": finished.priority}
    if finished.error is not None or finished.status >= 400:
        found |= {ERROR_TYPE: finished.error or str(finished.status)}
    return found | trace.attributes


def _context(trace: RequestTrace) -> Context:
    """Return the context of a request's span: that of its caller, or an empty one."""
    if (parent := trace.parent) is None:
        return Context()
    state = TraceState.from_header([trace.state.decode("latin-1")]) if trace.state else None
    context = SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), state)
    return set_span_in_context(NonRecordingSpan(context), Context())


def _links(batch: TracedBatch) -> Sequence[Link]:
    return [Link(SpanContext(trace.trace_id, trace.span_id, False, _SAMPLED)) for trace in batch.traces[:MAX_LINKS]]
