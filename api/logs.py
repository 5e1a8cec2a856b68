"""One renderer for every log line of the process, ours and the libraries': a person's on a terminal, else JSON lines.

Lines go to the standard error stream. Only the command line calls `configure()`; a host that embeds the engine
configures structlog as it likes.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Final, Literal, TextIO, TypeAlias, cast

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Format: TypeAlias = Literal["auto", "text", "json"]

_LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(level: Level = "info", format_: Format = "auto") -> None:
    """Set up structlog and the standard library's logging. `auto` writes text where stderr is a terminal."""
    text = sys.stderr.isatty() if format_ == "auto" else format_ == "text"
    renderer: list[Processor] = (
        # Where rich is installed, structlog's own choice prints the values of variables: keys, and what callers sent.
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if text
        else [structlog.processors.format_exc_info, _render_json]
    )
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*common, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lossy(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # What libraries say in passing is of use to who debugs them; what they warn of is of use to everyone.
    root.setLevel(_LEVELS[level] if level == "debug" else max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


class _Lossy:
    """A stream whose lines may be lost: neither a log that nobody reads any more nor a full disk may fail what was to
    be logged. Without this, a server whose log is gone would not even drain."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _render_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
