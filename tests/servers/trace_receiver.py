"""A collector of traces: it takes what an exporter sends over OTLP/HTTP."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio.to_thread
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """The spans so far. When the exporting server has ended, all are here."""

    url: str = ""
    status: int = 200
    """Status of its answers."""
    spans: list[Span] = field(default_factory=list)
    resources: list[Mapping[str, object]] = field(default_factory=list)
    """Attributes of the resource of each export."""
    headers: list[Mapping[str, str]] = field(default_factory=list)
    """Headers of each export, with names in lower case."""
    raw: bytes = b""
    """All bodies."""
    held: threading.Event = field(default_factory=threading.Event)
    """It answers once this is set."""

    def named(self, name: str) -> Span:
        """Return the only span of a name."""
        (span,) = (span for span in self.spans if span.name == name)
        return span

    @property
    def names(self) -> list[str]:
        """Names of all spans, in order."""
        return sorted(span.name for span in self.spans)

    @property
    def requests(self) -> list[Span]:
        """The spans of requests, in the order of their starts."""
        found = (span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER)
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def below(self, parent: Span) -> dict[str, Span]:
        """Return the spans below another one, by their names."""
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}

    def take(self, body: bytes, headers: Mapping[str, str]) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.raw += body
        self.headers.append(headers)
        for of_resource in request.resource_spans:
            self.resources.append({each.key: _value(each.value) for each in of_resource.resource.attributes})
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)


def attributes(span: Span) -> dict[str, object]:
    """Return the attributes of a span."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


@asynccontextmanager
async def collecting(*, status: int = 200, hangs: bool = False) -> AsyncIterator[Collector]:
    """Run a collector beside an event loop; see `collecting_in_threads`."""
    with ExitStack() as stack:
        collector = stack.enter_context(collecting_in_threads(status=status, hangs=hangs))
        ends = stack.pop_all()
    try:
        yield collector
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(ends.close)


@contextmanager
def collecting_in_threads(*, status: int = 200, hangs: bool = False) -> Iterator[Collector]:
    """Run a collector in threads.

    Args:
        status: See `Collector`.
        hangs: Answer nothing until the end of the block.
    """
    collector = Collector(status=status)
    if not hangs:
        collector.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.held.wait(60)
            if collector.status == 200:
                collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.held.set()
            server.shutdown()
            thread.join()
