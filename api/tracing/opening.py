"""Opening of traces: nothing of OpenTelemetry is imported unless they are on."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from staged_pool.api.config import ServerConfig
from staged_pool.api.trace_endpoint import shown, traces_url
from staged_pool.api.tracing.tracer import Tracer
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from staged_pool.api.tracing.exporting import Exporting

_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.semconv")


def check_installed(endpoint: str) -> None:
    """Check that spans can be exported.

    Args:
        endpoint: Where they go, for the error.

    Raises:
        ConfigError: A package is not installed.
    """
    if not all(map(_is_installed, _NEEDED)):
        raise ConfigError(f"trace_endpoint={endpoint!r}: traces need OpenTelemetry; pip install 'staged-pool[otel]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


@asynccontextmanager
async def traces_of(config: ServerConfig) -> AsyncIterator[Tracer | None]:
    """Export spans for a block; at its end those that are left, for a bounded time.

    Args:
        config: Where they go. Without an endpoint, traces are off, and nothing of OpenTelemetry is imported.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if config.trace_endpoint is None:
        yield None
        return
    check_installed(config.trace_endpoint)
    exporting = await anyio.to_thread.run_sync(_open, config.trace_endpoint)
    try:
        yield Tracer(exporting.spans, config.trace_ratio)
    finally:
        await exporting.close()


def _open(endpoint: str) -> Exporting:
    from staged_pool.api.tracing.exporting import Exporting

    return Exporting(traces_url(endpoint), shown(endpoint))
