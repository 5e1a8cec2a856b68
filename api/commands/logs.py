"""One renderer for every log line of the process, ours and the libraries': a person's on a terminal, else JSON lines.

Lines go to the standard error stream, in a thread of their own. Only the command line calls `configure()`; a host that
embeds the engine hears of it through the standard library's logging (`stages/log.py`).
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TextIO, TypeAlias, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from staged_pool.stages import log

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Format: TypeAlias = Literal["auto", "text", "json"]

_LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

MOST_LINES: Final = 10_000
"""That wait to be written, some megabytes: more are lost, and counted."""

GATHER_S: Final = 0.05
"""How long a line waits for others, to be written with them: each write makes the whole interpreter change threads."""

DRAIN_S: Final = 1.0
"""How long the end of the process waits for those who read the log."""


def configure(level: Level = "info", format_: Format = "auto") -> None:
    """Set up our loggers and the standard library's logging. `auto` writes text where stderr is a terminal."""
    stream = cast(TextIO, _stream(sys.stderr))
    text = sys.stderr.isatty() if format_ == "auto" else format_ == "text"
    renderer: list[Processor] = (
        # Where rich is installed, structlog's own choice prints the values of variables: keys, and what callers sent.
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if text
        else [structlog.processors.format_exc_info, _render_json]
    )
    common: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    filtering = structlog.make_filtering_bound_logger(_LEVELS[level])
    bound: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(file=stream),
        processors=[*common, *renderer],
        wrapper_class=filtering if text or _LEVELS[level] > logging.INFO else _rendering_at_once(filtering),
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
    # What libraries say in passing is of use to who debugs them; what they warn of is of use to everyone.
    root.setLevel(_LEVELS[level] if level == "debug" else max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


def drain() -> None:
    """Wait, but not for long, until what has been logged is written: what is printed next belongs behind it."""
    if isinstance(writer := _latest, _Writer):
        writer.drain()


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


class _Writer:
    """The same, and a log that is read too slowly holds up nobody either: a thread writes to the file, some lines at a
    time. Those of the last moment before the process is killed may be lost, too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._hurry = threading.Event()
        self._lost = 0
        self._losing = threading.Lock()
        # A daemon, for a write to a pipe that nobody reads never ends. It holds no lock of a stream meanwhile.
        threading.Thread(target=self._run, name="staged-pool logs", daemon=True).start()
        atexit.register(self.drain)

    def write(self, text: str) -> None:
        if self._waiting.qsize() < MOST_LINES:
            self._waiting.put(text)
        else:
            with self._losing:
                self._lost += 1

    def flush(self) -> None:
        """Does nothing: whoever logs waits for nobody."""

    def drain(self) -> None:
        written = threading.Event()
        self._waiting.put(written)
        self._hurry.set()
        written.wait(DRAIN_S)

    def _run(self) -> None:
        own = log.get_logger("staged_pool.logs")
        while True:
            first = self._waiting.get()
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            drains = self._write_waiting(first)
            while lost := self._take_lost():
                drains += self._write_waiting()  # which makes room for
                own.warning("log.lines_lost", lines=lost, reason="they were not read soon enough")
                drains += self._write_waiting()
            for written in drains:
                written.set()

    def _take_lost(self) -> int:
        with self._losing:
            lost, self._lost = self._lost, 0
        return lost

    def _write_waiting(self, *first: str | threading.Event) -> list[threading.Event]:
        """Write what waits; returns who wants to know of it."""
        each = [*first]
        with suppress(Empty):
            while len(each) < MOST_LINES:
                each.append(self._waiting.get_nowait())
        self._write_out("".join(line for line in each if isinstance(line, str)).encode(errors="backslashreplace"))
        return [written for written in each if isinstance(written, threading.Event)]

    def _write_out(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # somebody who shares the file does not want to wait
                time.sleep(GATHER_S)
            except OSError:
                return


_latest: _Lossy | _Writer | None = None


def _stream(stream: TextIO) -> _Lossy | _Writer:
    global _latest  # noqa: PLW0603  # it belongs to the process, as the stream does
    try:
        _latest = _Writer(stream.fileno())
    except io.UnsupportedOperation:  # it has been put in its place, and is no file
        _latest = _Lossy(stream)
    return _latest


def _rendering_at_once(filtering: type[FilteringBoundLogger]) -> type[FilteringBoundLogger]:
    """The same, with a shorter way for most lines: each request has one, and on the longer way it took 5 % of what the
    event loop does for a short text (cProfile), twice as much as on this."""

    class AtOnce(filtering):  # type: ignore[misc,valid-type]  # it is made for a level
        def info(self, event: str, **fields: object) -> Any:
            if "exc_info" in fields:
                return super().info(event, **fields)
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            line = _render_json(self._logger, "info", {**fields, "event": event, "level": "info", "timestamp": now})
            return self._logger.info(line)

    return AtOnce


def _render_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
