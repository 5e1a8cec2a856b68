"""Setup of a process that serves: its limit of open files, and signals that write stacks."""

from __future__ import annotations

import faulthandler
import signal
from types import FrameType
from typing import Final

from staged_pool.stages.log import get_logger

_STDERR: Final = 2
"""Descriptor of stderr: signal handlers must not use Python's streams."""

log = get_logger("staged_pool.server")


def dump_stacks_on_signals() -> None:
    """Make SIGUSR1 and SIGUSR2 write the stacks of all threads to stderr.

    By default these signals end the process. Call it in the main thread, which writes the stacks between two of its
    instructions, when it has the interpreter's lock. `faulthandler.register` would write them at once: it reads frames
    of threads that run meanwhile, and about one signal in a thousand ended the process with SIGSEGV.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _dump_stacks)


def _dump_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(_STDERR, all_threads=True)


def allow_files(count: int) -> None:
    """Raise the process's limit of open files to `count`, as far as the system allows."""
    try:
        import resource
    except ImportError:
        return  # only POSIX has this limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        log.warning("server.few_files", limit=wanted, wanted=count)
