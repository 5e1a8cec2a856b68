"""Standard files: the descriptors 0 to 2 of every program."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Final

FIRST_OTHER: Final = 3
"""The least number of a descriptor that no program takes for a standard file."""


def open_closed_ones() -> None:
    """Open the null device as each standard file that is closed.

    Programs that are started from here inherit it. The next file would get its number otherwise: a listening socket,
    or a connection to which libraries then write their errors. Where there is no null device, the numbers stay free.
    """
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < FIRST_OTHER:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)


def inherited_number(descriptor: int, files: ExitStack) -> int:
    """Return a number by which a program that is started can inherit a descriptor.

    That program has its standard files at 0 to 2, so a descriptor there is duplicated.

    Args:
        descriptor: An open descriptor of this process.
        files: Closes the duplicate, once the program has it.

    Raises:
        OSError: This process may open no more.
    """
    if descriptor >= FIRST_OTHER:
        return descriptor
    import fcntl  # which only POSIX has, where descriptors are inherited by number

    duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_OTHER)
    files.callback(os.close, duplicate)
    return duplicate
