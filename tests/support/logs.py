"""Log events of the package as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from staged_pool.stages import log


@contextmanager
def logs_to(processor: Processor) -> Iterator[None]:
    """Give all log events of this package to `processor`, whatever their level."""

    def make(name: str) -> FilteringBoundLogger:
        made: FilteringBoundLogger = structlog.wrap_logger(
            structlog.testing.ReturnLogger(),
            processors=[processor],
            wrapper_class=structlog.make_filtering_bound_logger(0),
            context_class=dict,
        ).bind()
        return made

    was = log.use(make)
    try:
        yield
    finally:
        log.use(was)


@contextmanager
def captured_logs() -> Iterator[list[EventDict]]:
    """Collect the package's log events, as data."""
    capture = structlog.testing.LogCapture()
    with logs_to(capture):
        yield capture.entries
