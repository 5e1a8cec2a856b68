"""The loggers of this package: structlog's, on top of the standard library's under `staged_pool`.

A library says nothing until its host wants to hear it: `staged_pool` has a handler that writes nothing, and whatever
handlers and levels the host gives to it, or to the root, hold as for any other logger. No global setting of structlog
is read or changed, so a host may configure structlog for itself in any way. Only a program that owns its process, as
the command line does, has the loggers made in another way (`use`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

Maker: TypeAlias = Callable[[str], FilteringBoundLogger]
"""Makes a logger out of its name."""

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_CALLER: Final = 4
"""Frames from the standard library's logger up to whoever logs: two of structlog's and one of `Logger` between them."""

logging.getLogger("staged_pool").addHandler(logging.NullHandler())


class Logger:
    """A named logger. The first argument of each method names the event, the others are its fields."""

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
    """Return the logger of a name under `staged_pool`. It heeds each later `use`."""
    return Logger(name)


def use(maker: Maker) -> Maker:
    """Have all loggers of this package made by `maker` from now on. Returns the one that was used so far."""
    global _maker  # it belongs to the process, as logging's own settings do
    was, _maker = _maker, maker
    return was


def on_standard_logging(name: str) -> FilteringBoundLogger:
    """Make a logger that hands each event to the standard library's logger of the same name."""
    made: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[_drop_unheard, _as_standard_record],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind()
    return made


_maker: Maker = on_standard_logging


def _drop_unheard(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if not logger.isEnabledFor(_LEVELS[method]):
        raise structlog.DropEvent
    return event


def _as_standard_record(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of `Logger.info` and its like: `event key=value ...`, and the fields as `record.fields`."""
    exc_info = event.pop("exc_info", None)
    name = str(event.pop("event"))
    text = " ".join([name, *(f"{key}={value!r}" for key, value in event.items())])
    return (text,), {"exc_info": exc_info, "extra": {"event": name, "fields": event}, "stacklevel": _CALLER}
