"""Progress of loads: the phase that runs, and the bytes of a download."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


class LoadPhase(StrEnum):
    """One step of a load."""

    DOWNLOAD = "download"
    WEIGHTS = "weights"
    WARM_UP = "warm-up"


_SENTENCES: Final = {
    LoadPhase.DOWNLOAD: "downloading {}",
    LoadPhase.WEIGHTS: "reading the weights of {}",
    LoadPhase.WARM_UP: "warming {} up",
}


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The state of a load."""

    model: str
    """Served name, or the name on the hub while it is downloaded."""
    phase: LoadPhase
    done_bytes: int = 0
    """Downloaded bytes, those of an earlier start included."""
    total_bytes: int = 0
    """Bytes of the files of which the size is known by now; 0 in the other phases."""

    @property
    def percent(self) -> int | None:
        """Downloaded part in percent, rounded down; None in the other phases."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else None

    @property
    def sentence(self) -> str:
        """The state in words, with the percentage if there is one."""
        words = _SENTENCES[self.phase].format(self.model)
        return words if self.percent is None else f"{words}, {self.percent} %"


Listener: TypeAlias = Callable[[LoadStatus | None], object]
"""Called with each new state, in the thread that reports it; with None after a phase. Must not block or raise."""


class LoadProgress:
    """The state of the load that runs now, with log events for each phase.

    Any thread may report or read it. Of two loads at once, the one that reported last is seen.

    Args:
        listener: See `Listener`.
    """

    def __init__(self, listener: Listener = lambda status: None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self.status: LoadStatus | None = None
        """The state; None between phases, and while nothing is loaded."""

    @contextmanager
    def phase(self, model: str, phase: LoadPhase) -> Iterator[None]:
        """Mark a block as one phase. Its end is logged unless it raises."""
        with self._begun(LoadStatus(model, phase)):
            yield

    @contextmanager
    def download(self, model: str) -> Iterator[Callable[[int, int], None]]:
        """Mark a block that may download. It gets a function of the downloaded and the total bytes, for any thread.

        The phase begins with the first bytes: a model in the local cache has none.
        """
        began_at, latest = 0.0, LoadStatus(model, LoadPhase.DOWNLOAD)

        def moved(done_bytes: int, total_bytes: int) -> None:
            nonlocal began_at, latest
            if not total_bytes:
                return
            with self._lock:
                if not began_at:
                    began_at = time.monotonic()
                    log.info("model.phase_began", model=model, phase=LoadPhase.DOWNLOAD.value)
                latest = LoadStatus(model, LoadPhase.DOWNLOAD, min(done_bytes, total_bytes), total_bytes)
                self._tell(latest)

        try:
            yield moved
            if began_at:
                _log_end(latest, began_at, bytes=latest.total_bytes)
        finally:
            self._tell(None)

    @contextmanager
    def _begun(self, status: LoadStatus) -> Iterator[None]:
        began_at = time.monotonic()
        log.info("model.phase_began", model=status.model, phase=status.phase.value)
        self._tell(status)
        try:
            yield
        finally:
            self._tell(None)
        _log_end(status, began_at)

    def _tell(self, status: LoadStatus | None) -> None:
        self.status = status
        self._listener(status)


def _log_end(status: LoadStatus, began_at: float, **amounts: int) -> None:
    seconds = round(time.monotonic() - began_at, 3)
    log.info("model.phase_ended", model=status.model, phase=status.phase.value, seconds=seconds, **amounts)


_CURRENT: Final[ContextVar[LoadProgress | None]] = ContextVar("load_progress", default=None)


def load_progress() -> LoadProgress:
    """Return the progress to which loads in this context report; a new one if there is none."""
    return _CURRENT.get() or LoadProgress()


@contextmanager
def reporting_loads(progress: LoadProgress) -> Iterator[None]:
    """Let loads report here that begin in the block, or in tasks that it starts."""
    token = _CURRENT.set(progress)
    try:
        yield
    finally:
        _CURRENT.reset(token)
