"""Standard streams of a command, which a process manager may have closed."""

from __future__ import annotations

import os
import sys
from typing import Final

from staged_pool.runtime.machine.standard_files import open_closed_ones

_STREAMS: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""Modes by the names in `sys`."""


def open_standard_streams() -> None:
    """Put the null device in the place of each closed standard stream, also for children."""
    open_closed_ones()
    for name, mode in _STREAMS.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # to the end of the process
