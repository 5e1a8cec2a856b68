"""One renderer for every log line of the process, ours and the libraries': a person's on a terminal, else JSON lines.

Lines go to the standard error stream. Only the command line calls `configure()`; a host that embeds the engine
configures structlog as it likes.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal, TypeAlias

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
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
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


def _render_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
