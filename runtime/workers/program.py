"""Program of a worker process: does jobs until its pool closes the pipe."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from staged_pool.runtime.workers.jobs import Done, Failed, Ready, Work
from staged_pool.runtime.workers.pipe import Pipe
from staged_pool.stages.errors import StagedPoolError

NICE: Final = 10
"""Niceness of worker processes: the server goes first, above all its event loop. `perf plugins` measures it."""


def main(end: int, written: int, read: int) -> None:
    """Open the work that the pool sends, then do its jobs.

    Args:
        end: Descriptor of the socket to the pool.
        written: Descriptor of the shared memory that this process writes.
        read: Descriptor of the shared memory that the pool writes.
    """
    os.dup2(2, 1)  # the standard output of the server is not for the code that runs here
    pipe = Pipe(socket.socket(fileno=end), written, read)
    try:
        work: Work = pipe.receive()
        try:
            do = work.open()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # code of a model folder may raise anything
            pipe.send(Failed(str(error)))
            return
        os.nice(NICE)  # only now: a start in its place would take long beside a busy server
        pipe.send(Ready())
        while True:
            job = pipe.receive()
            try:
                answer: Done | Failed = Done(do(job))
            except StagedPoolError as error:
                answer = Failed(str(error), error)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # as above
                answer = Failed(f"{type(error).__name__}: {error}")
            pipe.send(answer)
    except (EOFError, ConnectionError):
        return  # the pool is gone


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
