"""Loggers of this package: structlog on top of the standard library's `staged_pool` loggers.

A library is silent until its host wants to hear it: `staged_pool` has a handler that writes nothing. Handlers and
levels that the host sets on it, or on the root logger, work as for any other logger. No global setting of structlog is
read or changed, so a host may configure structlog in any way. A program that owns its process, as the command line
does, may replace how the loggers are made (`use`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

Maker: TypeAlias = Callable[[str], FilteringBoundLogger]
"""Makes a logger from its name."""

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_CALLER: Final = 4
"""Frames between the standard library's logger and the calling code: two of structlog, one of `Logger`."""

logging.getLogger("staged_pool").addHandler(logging.NullHandler())


class Logger:
    """A named logger. The first argument of each method names the event; the others are its fields."""

    __slots__ = ("_bound", "_made_by", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._made_by: Maker | None = None
        self._bound: Any = None

    def _current(self) -> Any:
        if self._made_by is not _maker:
            self._bound, self._made_by = _maker(self._name), _maker
        return self._bound

    def debug(self, event: str, **fields: object) -> None:
        self._current().debug(event, **fields)

    def info(self, event: str, **fields: object) -> None:
        self._current().info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        self._current().warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        self._current().error(event, **fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._current().error(event, **{"exc_info": True, **fields})


def get_logger(name: str) -> Logger:
    """Return the logger of a name under `staged_pool`. Each later `use` applies to it."""
    return Logger(name)


def use(maker: Maker) -> Maker:
    """Make all loggers of this package with `maker` from now on. Returns the previous maker."""
    global _maker  # one for the process, as the settings of `logging` are
    was, _maker = _maker, maker
    return was


def on_standard_logging(name: str) -> FilteringBoundLogger:
    """Make a logger that passes events to the standard library's logger of that name."""
    made: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[_filter_by_level, _as_standard_record],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind()
    return made


_maker: Maker = on_standard_logging


def _filter_by_level(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if not logger.isEnabledFor(_LEVELS[method]):
        raise structlog.DropEvent
    return event


def _as_standard_record(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments for `logging.Logger`: the text `event key=value ...`, and fields as `record.fields`."""
    exc_info = event.pop("exc_info", None)
    name = str(event.pop("event"))
    text = " ".join([name, *(f"{key}={value!r}" for key, value in event.items())])
    return (text,), {"exc_info": exc_info, "extra": {"event": name, "fields": event}, "stacklevel": _CALLER}
