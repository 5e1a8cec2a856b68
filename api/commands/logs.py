"""Logging of the process: one renderer for our lines and those of libraries.

It writes text on a terminal, else JSON lines, to the standard error stream and in a thread of its own. Only the command
line calls `configure()`; a host that embeds the engine gets the lines through the standard library's logging
(`stages/log.py`).
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TextIO, TypeAlias, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from staged_pool.api.commands.terminal import TerminalRenderer
from staged_pool.stages import log

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]

_LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

MAX_LINES: Final = 10_000
"""Maximum lines that wait to be written, some megabytes. More are dropped and counted."""

FLUSH_INTERVAL_S: Final = 0.05
"""Seconds that a line waits for others, to be written with them. Each write makes the interpreter switch threads."""

_CLEAR: Final = "\r\x1b[2K"
"""Removes the line of the cursor from a terminal."""

DRAIN_S: Final = 1.0
"""Seconds that the end of the process waits for the reader of the log."""


def configure(level: LogLevel = "info", format_: LogFormat = "auto", *, process: str | None = None) -> None:
    """Set up our loggers and the standard library's logging. `auto` writes text where stderr is a terminal.

    Args:
        level: Least severe level to log.
        format_: `text`, `json` or `auto`.
        process: Name of this process among those of its server, for each line. None: there is only this one.
    """
    stream = cast(TextIO, _stream(sys.stderr))
    text = sys.stderr.isatty() if format_ == "auto" else format_ == "text"
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, TerminalRenderer(colours=sys.stderr.isatty())]
        if text
        else [structlog.processors.format_exc_info, _render_json]
    )
    common: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    named = {} if process is None else {"process": process}
    if named:
        common.append(lambda _logger, _method, event: {**event, **named})
    filtering = structlog.make_filtering_bound_logger(_LEVELS[level])
    bound: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(file=stream),
        processors=[*common, *renderer],
        wrapper_class=filtering if text or _LEVELS[level] > logging.INFO else _rendering_at_once(filtering, named),
        context_class=dict,
    ).bind()
    log.use(lambda name: bound)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries' own info lines help only in debugging; their warnings help everyone.
    root.setLevel(_LEVELS[level] if level == "debug" else max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


def status_line() -> Callable[[str], None] | None:
    """Return a function that shows a line of text below the log.

    Each call replaces the line, and an empty text removes it. None if stderr is no terminal.
    """
    return _latest.show if isinstance(_latest, _Writer) and sys.stderr.isatty() else None


def drain() -> None:
    """Wait at most `DRAIN_S` until all lines are written. Text printed next then follows them."""
    if isinstance(writer := _latest, _Writer):
        writer.drain()


class _LossyStream:
    """Stream that drops a line it cannot write.

    A closed pipe or a full disk must not fail the code that logs: a server whose log is gone must still drain.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _Writer:
    """Writer with a thread of its own: a slow reader of the log delays nobody.

    The lines of the last moment before the process is killed may be lost.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._flush_now = threading.Event()
        self._lost = 0
        self._lost_lock = threading.Lock()
        self._status = self._shown = ""
        """The line below the log, and the one that is on the terminal."""
        # A daemon: a write to a pipe that nobody reads never ends. It holds no lock of a stream meanwhile.
        threading.Thread(target=self._run, name="staged-pool logs", daemon=True).start()
        atexit.register(self.drain)

    def write(self, text: str) -> None:
        if self._waiting.qsize() < MAX_LINES:
            self._waiting.put(text)
        else:
            with self._lost_lock:
                self._lost += 1

    def flush(self) -> None:
        """Do nothing: a caller that logs never waits."""

    def show(self, status: str) -> None:
        self._status = status
        self._waiting.put("")

    def drain(self) -> None:
        written = threading.Event()
        self._waiting.put(written)
        self._flush_now.set()
        written.wait(DRAIN_S)

    def _run(self) -> None:
        own = log.get_logger("staged_pool.logs")
        while True:
            first = self._waiting.get()
            self._flush_now.wait(FLUSH_INTERVAL_S)
            self._flush_now.clear()
            drains = self._write_waiting(first)
            while lost := self._take_lost():
                drains += self._write_waiting()  # makes room for the warning
                own.warning("log.lines_lost", lines=lost, reason="the log was read too slowly")
                drains += self._write_waiting()
            for written in drains:
                written.set()

    def _take_lost(self) -> int:
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        return lost

    def _write_waiting(self, *first: str | threading.Event) -> list[threading.Event]:
        """Write the waiting lines; return the events to set once they are written."""
        each = [*first]
        with suppress(Empty):
            while len(each) < MAX_LINES:
                each.append(self._waiting.get_nowait())
        text = "".join(line for line in each if isinstance(line, str))
        if self._shown or self._status:
            text = f"{_CLEAR if self._shown else ''}{text}{self._status}"
            self._shown = self._status
        self._write_out(text.encode(errors="backslashreplace"))
        return [written for written in each if isinstance(written, threading.Event)]

    def _write_out(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # a process that shares the file has made it non-blocking
                time.sleep(FLUSH_INTERVAL_S)
            except OSError:
                return


_latest: _LossyStream | _Writer | None = None


def _stream(stream: TextIO) -> _LossyStream | _Writer:
    global _latest  # noqa: PLW0603  # one for the process, as the stream is
    try:
        _latest = _Writer(stream.fileno())
    except io.UnsupportedOperation:  # a replacement of stderr that is no file
        _latest = _LossyStream(stream)
    return _latest


def _rendering_at_once(filtering: type[FilteringBoundLogger], named: Mapping[str, str]) -> type[FilteringBoundLogger]:
    """Make a logger class that renders info lines without structlog's chain of processors.

    Each request has such a line, and the chain takes twice the time (cProfile of a server with short texts).
    """

    class AtOnce(filtering):  # type: ignore[misc,valid-type]  # the base class depends on the level
        def info(self, event: str, **fields: object) -> Any:
            if "exc_info" in fields:
                return super().info(event, **fields)
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            fields = {**fields, **named, "event": event, "level": "info", "timestamp": now}
            line = _render_json(self._logger, "info", fields)
            return self._logger.info(line)

    return AtOnce


def _render_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
