"""Signals of a process of ours: those that end it, and those that write stacks.

Every entry point sets its handlers here and nowhere else: the command line, the children of a server of several
processes, worker processes, and a server that owns its process. A program that embeds an engine keeps its own.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Final

_STDERR: Final = 2
"""Descriptor of stderr: signal handlers must not use Python's streams."""


def report_crashes() -> None:
    """Write all stacks to stderr when a signal such as SIGSEGV ends the process.

    They go to the descriptor, because a handler must not use Python's streams. A handler that is on already stays.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)


def write_stacks_on_signals() -> None:
    """Make SIGUSR1 and SIGUSR2 write the stacks of all threads to stderr.

    By default these signals end the process. The main thread writes the stacks between two of its instructions, when it
    has the interpreter's lock. `faulthandler.register` would write them at once: it reads frames of threads that run
    meanwhile, and about one signal in a thousand ended the process with SIGSEGV. A handler that is set already stays,
    and in another thread than the main one nothing is set.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        _handle(name, _write_stacks)


def leave_the_end_to_the_parent() -> None:
    """Make the signals that end a process do nothing in a child.

    The supervisor ends it by its control line, and a pool its workers by their pipe. So a signal to all processes of a
    server at once ends them in their order, and costs no request. No signal is set to be ignored: that would pass on to
    the processes that a child starts.
    """
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        _handle(name, _do_nothing)


def end_signals() -> AbstractContextManager[AsyncIterator[signal.Signals]]:
    """Receive, for a block, the signals that drain a server."""
    names = ["SIGTERM", "SIGINT"]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # `nohup` ignores it
        names.append("SIGHUP")
    import anyio  # not for a command that only prints

    return anyio.open_signal_receiver(*(signal.Signals[name] for name in names))


def interrupts() -> AbstractContextManager[AsyncIterator[signal.Signals]]:
    """Receive, for a block, the signals that stop a command."""
    import anyio

    return anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM)


def _handle(name: str, handler: Callable[[int, FrameType | None], None]) -> None:
    number = getattr(signal, name, None)
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(number, handler)


def _write_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(_STDERR, all_threads=True)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
