"""Standard streams of a command, which a process manager may have closed.

The next descriptors that a process opens, such as those of its event loop, would get their numbers. Then whatever
writes to a standard stream writes there, and the end of the interpreter closes them.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By descriptor, from 0: names in `sys`, and modes."""


def open_standard_streams() -> None:
    """Put the null device in the place of each closed standard stream, also for children."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this one
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # to the end of the process
