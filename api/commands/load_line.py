"""The line of a load on a terminal: a bar of the download, or the phase that runs."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from typing import Final

from staged_pool.runtime.load_progress import LoadPhase, LoadStatus

REDRAW_S: Final = 0.1
"""Shortest time between two drawings of one percentage, in seconds."""

_BAR_CELLS: Final = 30
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class LoadLine:
    """Draws the state of a load. It is a listener of `LoadProgress`.

    Args:
        show: Shows a line of text below the log, in place of the last one; none if it is empty.
        clock: Returns the time in seconds.
        colours: Write ANSI colours. `NO_COLOR` turns them off.
    """

    def __init__(
        self, show: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic, colours: bool = True
    ) -> None:
        self._show = show
        self._clock = clock
        self._colours = colours and not os.environ.get("NO_COLOR")
        self._began: tuple[float, int] | None = None
        """Time and bytes at the beginning of the download."""
        self._drawn: tuple[int | None, float] = None, 0.0
        """Percentage and time of the last drawing."""

    def __call__(self, status: LoadStatus | None) -> None:
        """Draw a state, unless one of the same percentage has just been drawn."""
        if status is None:
            self._began, self._drawn = None, (None, 0.0)
            self._show("")
        elif status.phase is not LoadPhase.DOWNLOAD:
            self._show(f"{status.sentence} ...")
        else:
            now = self._clock()
            if self._began is None:
                self._began = now, status.done_bytes
            percent, drawn_at = self._drawn
            if percent != status.percent or now - drawn_at >= REDRAW_S:
                self._drawn = status.percent, now
                self._show(self._bar(status, now))

    def _bar(self, status: LoadStatus, now: float) -> str:
        assert self._began is not None
        began_at, before = self._began
        parts = [f"{status.percent:3} %", f"{size(status.done_bytes)} of {size(status.total_bytes)}"]
        if (seconds := now - began_at) > 0 and status.done_bytes > before:
            rate = (status.done_bytes - before) / seconds
            parts += [f"{size(rate)}/s", f"{(status.total_bytes - status.done_bytes) / rate:.0f} s left"]
        words = f"  {'  '.join(parts)}"
        columns = shutil.get_terminal_size().columns - 1
        name = status.sentence.partition(",")[0]
        if len(name) + 2 + _BAR_CELLS + len(words) > columns:
            return f"{name}{words}"[:columns]
        return f"{name}  {self._cells(status)}{words}"

    def _cells(self, status: LoadStatus) -> str:
        from rich.console import Console  # not before a download begins
        from rich.progress_bar import ProgressBar

        drawn = io.StringIO()
        console = Console(
            file=drawn,
            width=_BAR_CELLS,
            force_terminal=True,
            color_system="standard" if self._colours else None,
            legacy_windows=False,
        )
        bar = ProgressBar(total=status.total_bytes, completed=status.done_bytes, width=_BAR_CELLS)
        console.print(bar, end="")
        return drawn.getvalue().rstrip("\n")


def size(bytes_: float) -> str:
    """Return a number of bytes in the largest decimal unit that leaves at least one."""
    for scale, unit in _UNITS:
        if bytes_ >= scale:
            return f"{bytes_ / scale:.1f} {unit}"
    return f"{bytes_:.0f} B"
