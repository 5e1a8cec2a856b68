"""Busy neighbours: processes that spin on each core, as on a shared machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import psutil

# It prints a line once it runs, and exits when its parent has gone.
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
    """Keep each core of this process busy during the block, at the same priority.

    Yields one process a core; none if they are not wanted. All spin before the block begins, and are killed after it.
    """
    with ExitStack() as running:
        cores = sorted(os.sched_getaffinity(0)) if wanted else []
        processes = [running.enter_context(_busy_loop(core)) for core in cores]
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("a busy loop did not start; its output is above")
        yield [psutil.Process(process.pid) for process in processes]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the total CPU time of processes so far, in seconds."""
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
        start_new_session=True,  # so that Ctrl-C reaches this process only, which kills it
    )
    with process:  # closes its pipe, and waits for it
        try:
            yield process
        finally:
            process.kill()
