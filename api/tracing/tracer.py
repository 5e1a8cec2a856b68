"""Tracer: it decides at the start of a request if the request is traced, and has its spans written at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from staged_pool.api.tracing.trace_context import (
    RootSampler,
    TraceParent,
    new_span_id,
    new_trace_id,
    trace_parent,
)
from staged_pool.stages.trace import Trace, TracedBatch


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTrace(Trace):
    """A traced request of this server."""

    parent: TraceParent | None
    """Span of the caller. None: the trace begins here."""
    state: bytes = b""
    """The caller's `tracestate`."""
    attributes: dict[str, str | int | list[str]] = field(default_factory=dict)
    """Attributes of the request's span that its handler knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One finished request, for its span."""

    operation: str | None
    """Name of its operation, such as `embeddings`. None: it is no task of a model."""
    route: str
    """A known route, never a client's path."""
    method: str
    status: int
    """Status of the answer, or 499 if the client left."""
    error: str | None
    """Name of the problem in the log. None: there is none."""
    times: tuple[float, float]
    """Its begin and its end, in seconds on the clock of the stages."""
    items: int
    tokens: int
    priority: str | None
    """None: no priority was read."""


class SpanWriter(Protocol):
    """Writes spans that have ended."""

    def request(self, trace: RequestTrace, finished: FinishedRequest) -> None:
        """Write the spans of a request that has ended."""
        ...

    def batch(self, batch: TracedBatch) -> None:
        """Write the span of a batch that has ended."""
        ...


class Tracer:
    """Samples requests: those of a sampled trace, and a part of those without a trace.

    Args:
        writer: Writes the spans.
        ratio: Part of the requests without a trace that are traced, 0 to 1.
    """

    def __init__(self, writer: SpanWriter, ratio: float) -> None:
        self._writer = writer
        self._roots = RootSampler(ratio)

    def start(self, headers: Mapping[bytes, bytes]) -> RequestTrace | None:
        """Return the trace of a request; None if it is not traced."""
        parent = trace_parent(headers.get(b"traceparent", b""))
        if parent is None:
            trace_id = new_trace_id()
            if not self._roots.chooses(trace_id):
                return None
            return RequestTrace(trace_id, new_span_id(), self._writer.batch, parent=None)
        if not parent.sampled:
            return None
        state = headers.get(b"tracestate", b"")
        return RequestTrace(parent.trace_id, new_span_id(), self._writer.batch, parent=parent, state=state)

    def finish(self, trace: RequestTrace, finished: FinishedRequest) -> None:
        """Write the spans of a request that has ended."""
        self._writer.request(trace, finished)

    def batch(self, batch: TracedBatch) -> None:
        """Write the span of a batch that has ended."""
        self._writer.batch(batch)
