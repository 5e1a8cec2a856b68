"""Signals of a process of ours: those that end it, and those that write stacks.

Every entry point sets its handlers here and nowhere else: the command line, the children of a server of several
processes, worker processes, and a server that owns its process. A program that embeds an engine keeps its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Final

_STDERR: Final = 2
"""Descriptor of stderr: signal handlers must not use Python's streams."""

AGAIN_S: Final = 0.05
"""Seconds in which the same signal, received after it was noted, is no second one.

uvloop hands it on once more if it came before the receiver was open, and after the event loop had begun."""

_noted: Final[list[signal.Signals]] = []
"""Signals that have come since `note_end_signals`, and that nobody has received."""


def report_crashes() -> None:
    """Write all stacks to stderr when a signal such as SIGSEGV ends the process.

    They go to the descriptor, because a handler must not use Python's streams. A handler that is on already stays.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)


def write_stacks_on_signals() -> None:
    """Make SIGUSR1 and SIGUSR2 write the stacks of all threads to stderr.

    By default these signals end the process. The main thread writes the stacks between two of its instructions, when it
    has the interpreter's lock, and asks the interpreter for the frames. `faulthandler` reads the memory of frames by
    itself: with its `register`, about one signal in a thousand ended the process with SIGSEGV, and processes that had
    used its `dump_traceback` ended so later. A handler that is set already stays, and in another thread than the main
    one nothing is set.
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


def note_end_signals() -> None:
    """Note the signals that drain a server until `end_signals` receives them. A second one ends the process at once.

    A server imports for seconds before it has an event loop. A signal would end it with its own status meanwhile, and
    the kernel would drop it if this is process 1 of a container.
    """
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        _handle(name, _note)


@contextmanager
def end_signals() -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive, for a block, the signals that drain a server: first the one that was noted before, if any."""
    names = ["SIGTERM", "SIGINT"]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, _note):  # `nohup` ignores it
        names.append("SIGHUP")
    import anyio  # not for a command that only prints

    with anyio.open_signal_receiver(*(signal.Signals[name] for name in names)) as later:
        yield _NotedFirst(later)


class _NotedFirst(AsyncIterator[signal.Signals]):
    def __init__(self, later: AsyncIterator[signal.Signals]) -> None:
        self._later = later
        self._waiting: list[signal.Signals] = []
        """Signals that came while the noted one was received."""

    async def __anext__(self) -> signal.Signals:
        import anyio

        if not _noted:
            return self._waiting.pop(0) if self._waiting else await self._later.__anext__()
        number = _noted.pop(0)
        with anyio.move_on_after(AGAIN_S):
            if (other := await self._later.__anext__()) != number:
                self._waiting.append(other)
        return number


@contextmanager
def first_interrupt_ignored() -> Iterator[None]:
    """Let the first SIGINT do nothing for a block. A further one has the effect that it had before."""
    before = signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    own, threads = threading.get_ident(), sys._current_frames()
    threads[own] = frame or threads[own]  # without this handler
    lines: list[str] = []
    for thread, top in threads.items():
        lines.append(f"{'Current thread' if thread == own else 'Thread'} {thread:#018x} (most recent call first):")
        at: FrameType | None = top
        while at is not None:
            lines.append(f'  File "{at.f_code.co_filename}", line {at.f_lineno} in {at.f_code.co_name}')
            at = at.f_back
    with suppress(OSError):
        os.write(_STDERR, "\n".join([*lines, ""]).encode(errors="backslashreplace"))


def _note(number: int, frame: FrameType | None) -> None:
    if _noted:
        os._exit(128 + number)
    _noted.append(signal.Signals(number))


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
