"""Program of a worker process: does jobs until its pool closes the pipe."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from staged_pool.runtime.machine.signals import leave_the_end_to_the_parent, report_crashes, write_stacks_on_signals
from staged_pool.runtime.machine.standard_files import open_closed_ones
from staged_pool.runtime.workers.jobs import Done, Failed, Ready, Work
from staged_pool.runtime.workers.pipe import Message, Pipe, pack

NICE: Final = 10
"""Niceness of worker processes: the server goes first, above all its event loop. `perf plugins` measures it."""


def main(end: int, written: int, read: int) -> None:
    """Open the work that the pool sends, then do its jobs.

    No signal ends the process, but one that cannot be handled: a service manager sends them to all processes of a
    server, which has requests to finish. The end of the pipe ends it, whatever it does.

    Args:
        end: Descriptor of the socket to the pool.
        written: Descriptor of the shared memory that this process writes.
        read: Descriptor of the shared memory that the pool writes.
    """
    open_closed_ones()
    report_crashes()
    write_stacks_on_signals()
    leave_the_end_to_the_parent()
    os.dup2(2, 1)  # the standard output of the server is not for the code that runs here
    os.set_inheritable(end, False)  # a process that a job starts must not keep the pipe open when this one has ended
    pipe = Pipe(end, written, read)
    threading.Thread(target=_end_with, args=(end,), name="pool-watch", daemon=True).start()
    os.register_at_fork(after_in_child=pipe.close_copy)
    try:
        work: Work = pipe.receive().value()
        try:
            do = work.open()
        except BaseException as error:  # noqa: BLE001  # code of users may raise anything
            pipe.send(pack(Failed.by(error)))
            return
        os.nice(NICE)  # only now: a start in its place would take long beside a busy server
        pipe.send(pack(Ready()))
        while True:
            pipe.send(_answer(do, pipe.receive()))
    except (EOFError, ConnectionError):
        return  # the pool is gone


def _end_with(end: int) -> None:
    """End the process with its pipe, though a job may have no end."""
    watch = select.poll()
    watch.register(end, 0)  # its end is always told, and jobs are not asked for
    watch.poll()
    os._exit(0)


def _answer(do: Callable[[Any], Any], job: Message) -> Message:
    try:
        return pack(Done(do(job.value())))
    except BaseException as error:  # noqa: BLE001  # as above; also what cannot be pickled
        return pack(Failed.by(error))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
