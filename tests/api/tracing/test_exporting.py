"""Export of spans: a collector that is dead, that hangs or rejects, and the end of the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext
from structlog.typing import EventDict

from staged_pool.api.tracing import exporting
from staged_pool.api.tracing.exporting import PlainExporter
from tests.servers.on_socket import Served, serving
from tests.servers.trace_receiver import attributes, collecting
from tests.support.user_code import RustPanic

pytestmark = pytest.mark.anyio

A_SPAN = ReadableSpan("a", SpanContext(1, 2, is_remote=False), resource=Resource({}))
NOBODY = "http://127.0.0.1:9"
"""The port of the service `discard`, on which nothing listens here."""


class _Records(logging.Handler):
    """Keeps log records."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@contextmanager
def libraries_logged() -> Iterator[list[logging.LogRecord]]:
    """Collect the lines that OpenTelemetry logs by itself."""
    handler, logger = _Records(), logging.getLogger("opentelemetry")
    logger.addHandler(handler)
    try:
        yield handler.kept
    finally:
        logger.removeHandler(handler)


def of_traces(logged: list[EventDict]) -> list[EventDict]:
    return [line for line in logged if line["event"].startswith("traces.")]


async def ask(served: Served, times: int = 1) -> None:
    async with served.client() as client:
        for _ in range(times):
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_a_dead_collector_delays_no_request_and_the_end_for_a_bounded_time(
    logged: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FLUSH_S", 0.2)
    with libraries_logged() as records:
        async with serving(trace_endpoint=NOBODY, trace_ratio=1.0) as served:
            await ask(served, times=20)
            began = time.monotonic()
        assert time.monotonic() - began < 5  # the exporter itself tries for 10 s
    (line,) = of_traces(logged)
    assert (line["event"], line["url"]) == ("traces.lost", NOBODY)
    assert not records


async def test_a_collector_that_hangs_does_not_hold_the_end(
    logged: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FLUSH_S", 0.2)
    async with collecting(hangs=True) as collector:
        async with serving(trace_endpoint=collector.url, trace_ratio=1.0) as served:
            await ask(served)
            began = time.monotonic()
        assert time.monotonic() - began < 5
    assert [line["event"] for line in of_traces(logged)] == ["traces.lost"]


async def test_a_collector_that_rejects_is_logged_once(
    logged: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    with libraries_logged() as records:
        async with collecting(status=400) as collector:
            async with serving(trace_endpoint=collector.url, trace_ratio=1.0) as served:
                await ask(served, times=5)  # 7 spans each, 5 exports
    (line,) = of_traces(logged)
    assert (line["event"], line["url"]) == ("traces.not_exported", collector.url)
    assert "400" in line["reason"]
    assert not records


async def test_the_first_success_after_failures_is_logged(logged: list[EventDict]) -> None:
    async with collecting(status=400) as collector:
        exporter = PlainExporter(OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces"), collector.url)
        spans = [A_SPAN]

        def export(status: int) -> None:
            collector.status = status
            exporter.export(spans)

        for status in (400, 404, 200, 200, 400):
            await anyio.to_thread.run_sync(export, status)
        exporter.shutdown()
        exporter.shutdown()  # the SDK calls it again
    assert [(line["event"], line.get("lost_spans")) for line in of_traces(logged)] == [
        ("traces.not_exported", None), ("traces.exported_again", 2), ("traces.not_exported", None),
    ]  # fmt: skip


async def test_no_connection_is_said_in_plain_words(logged: list[EventDict]) -> None:
    exporter = PlainExporter(OTLPSpanExporter(endpoint=f"{NOBODY}/v1/traces", timeout=2), NOBODY)
    await anyio.to_thread.run_sync(exporter.export, [A_SPAN])
    exporter.shutdown()
    (line,) = of_traces(logged)
    assert line["reason"] == "no connection to the collector"


async def test_the_end_loses_no_span() -> None:
    async with collecting() as collector:
        async with serving(trace_endpoint=collector.url, trace_ratio=1.0) as served:
            await ask(served, times=100)
    assert len(collector.requests) == 100
    assert collector.names.count("postprocess") == 100


async def test_variables_of_opentelemetry_name_the_service_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    async with collecting() as collector:
        async with serving(trace_endpoint=collector.url, trace_ratio=1.0) as served:
            await ask(served)
    assert collector.headers[0]["api-key"] == "secret"
    assert collector.resources[0]["service.name"] == "search"
    assert collector.resources[0]["deployment.environment.name"] == "test"


async def test_a_service_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    async with collecting() as collector:
        async with serving(trace_endpoint=collector.url, trace_ratio=1.0) as served:
            await ask(served)
    assert collector.resources[0]["service.name"] == "staged-pool"
    assert attributes(collector.requests[0])["gen_ai.provider.name"] == "staged_pool"


async def test_two_servers_of_one_process_have_collectors_of_their_own() -> None:
    async with collecting() as one, collecting() as other:
        async with serving(trace_endpoint=one.url, trace_ratio=1.0) as first:
            async with serving(trace_endpoint=other.url, trace_ratio=1.0) as second:
                await ask(first)
                await ask(second, times=2)
    assert (len(one.requests), len(other.requests)) == (1, 2)


class Panicking(SpanExporter):
    """An exporter whose library panics at first."""

    def __init__(self) -> None:
        self.times = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.times += 1
        if self.times == 1:
            raise RustPanic("boom")
        return SpanExportResult.SUCCESS


async def test_a_panic_of_the_exporter_loses_its_spans_and_no_others(logged: list[EventDict]) -> None:
    exporter = PlainExporter(Panicking(), NOBODY)
    results = [await anyio.to_thread.run_sync(exporter.export, [A_SPAN]) for _ in range(2)]
    exporter.shutdown()
    assert results == [SpanExportResult.FAILURE, SpanExportResult.SUCCESS]
    assert [(line["event"], line.get("reason"), line.get("lost_spans")) for line in of_traces(logged)] == [
        ("traces.not_exported", "RustPanic: boom", None), ("traces.exported_again", None, 1),
    ]  # fmt: skip
