"""A busy neighbour: processes that spin while a server is measured, as on a machine that is not the server's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import psutil

# It says that it runs, and ends by itself where nobody is left to end it.
_SPIN: Final = """
import os, sys
maker, core = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
print("spinning", flush=True)
while os.getppid() == maker:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_loops(*, wanted: bool = True) -> Iterator[Sequence[psutil.Process]]:
    """Keep every core that this process may use busy with one process, at this one's priority, during the block.

    Gives the processes; none if they are not wanted. All spin before the block begins, and have ended behind it.
    """
    with ExitStack() as running:
        cores = sorted(os.sched_getaffinity(0)) if wanted else []
        processes = [running.enter_context(_busy_loop(core)) for core in cores]
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("a busy loop did not begin; its last words are above")
        yield [psutil.Process(process.pid) for process in processes]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU time that processes have had so far, together, in seconds."""
    total_s = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


@contextmanager
def _busy_loop(core: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SPIN, str(os.getpid()), str(core)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C at the terminal reaches us only; we end it by its id
    )
    with process:  # closes its pipe, and waits for it
        try:
            yield process
        finally:
            process.kill()
