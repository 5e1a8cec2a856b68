"""Export of spans over OTLP/HTTP, in a thread of the SDK. What goes wrong there is logged once, in plain words.

Only `opening.py` imports this module, and only if traces are on: it needs OpenTelemetry.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio.to_thread
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from staged_pool.api.tracing.span_writer import OtelSpans, PresetIds
from staged_pool.runtime.version import VERSION
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import as_text, user_code

FLUSH_S: Final = 2.0
"""Most seconds for the export of the last spans, at the end of a server."""

_SERVICE: Final = "staged-pool"
_UNNAMED: Final = "unknown_service"
"""Start of the SDK's name of a service that nobody has named."""
_EXPORTER_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

log = get_logger("staged_pool.tracing")


class Exporting:
    """Export of the spans of one server.

    Args:
        url: Where they go: the full URL of a collector's OTLP/HTTP receiver.
        shown: The URL for the log.
    """

    def __init__(self, url: str, shown: str) -> None:
        self._exporter = PlainExporter(OTLPSpanExporter(endpoint=url), shown)
        ids = PresetIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # requests that are not sampled have no spans
            resource=_resource(),
            shutdown_on_exit=False,
            id_generator=ids,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.spans = OtelSpans(self._provider.get_tracer("staged_pool", VERSION), ids)
        """Writer of the spans to export."""

    async def close(self) -> None:
        """Export the last spans, for at most `FLUSH_S`. A collector that hangs keeps nobody for longer."""
        thread = threading.Thread(target=self._provider.shutdown, name="staged-pool traces", daemon=True)
        thread.start()
        try:
            await anyio.to_thread.run_sync(partial(thread.join, FLUSH_S), abandon_on_cancel=True)
        finally:
            if thread.is_alive():
                self._exporter.give_up()


class PlainExporter(SpanExporter):
    """Exports by another exporter. Of failures in a row, it logs the first one.

    Args:
        exporter: Sends the spans.
        shown: Where they go, for the log.
    """

    def __init__(self, exporter: SpanExporter, shown: str) -> None:
        self._exporter = exporter
        self._shown = shown
        self._lost = 0
        """Spans lost since the last success."""
        self._gave_up = False
        self._is_shut = threading.Lock()
        self._words = _LastWords()
        logging.getLogger(_EXPORTER_LOGGER).addFilter(self._words)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; called in the SDK's thread."""
        if self._gave_up:
            return SpanExportResult.FAILURE
        with self._words:
            result = self._sent(spans)
        if self._is_shut.locked():
            self._let_go()
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces.exported_again", url=self._shown, lost_spans=self._lost)
                self._lost = 0
            return result
        if not self._lost and not self._gave_up:
            log.warning("traces.not_exported", url=self._shown, reason=self._words.reason, spans=len(spans))
        self._lost += len(spans)
        return result

    def _sent(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            with user_code():
                return self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001  # it would end the SDK's thread, and with it the export for ever
            self._words.reason = as_text(error)
            return SpanExportResult.FAILURE

    def give_up(self) -> None:
        """Drop the spans that are not exported yet."""
        self._gave_up = True
        log.warning("traces.lost", url=self._shown, reason=f"they were not exported within {FLUSH_S:g} s")
        self.shutdown()

    def shutdown(self) -> None:
        """End the exporter; further calls do nothing."""
        if self._is_shut.acquire(blocking=False):
            self._exporter.shutdown()
            if not self._words.listens:  # otherwise the export that runs still has something to say
                self._let_go()

    def _let_go(self) -> None:
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self._words)


class _LastWords(logging.Filter):
    """Keeps lines of the exporter out of the log in a block of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: int | None = None
        self.reason = ""
        """Reason of the latest failure."""

    @property
    def listens(self) -> bool:
        """True in the block."""
        return self._thread is not None

    def __enter__(self) -> None:
        self._thread, self.reason = threading.get_ident(), ""

    def __exit__(self, *_: object) -> None:
        self._thread = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        if not self.reason:
            self.reason = _in_plain_words(record)
        return False


def _in_plain_words(record: logging.LogRecord) -> str:
    """Return the reason of a failure, from the exporter's first line about it."""
    args = record.args if isinstance(record.args, tuple) else ()
    error = next((each for each in args if isinstance(each, Exception)), None)
    if error is None:
        return record.getMessage()
    kind = type(error).__name__
    if "Timeout" in kind:
        return "the collector does not answer in time"
    return "no connection to the collector" if "Connection" in kind else kind


def _resource() -> Resource:
    """Return what the spans are of: `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME`, and values where these lack."""
    attributes = {SERVICE_VERSION: VERSION, "process.pid": os.getpid(), **Resource.create().attributes}
    if str(attributes[SERVICE_NAME]).startswith(_UNNAMED):
        attributes[SERVICE_NAME] = _SERVICE
    return Resource(attributes)
