"""Processes of worker pools that run beside a test."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

import psutil

from staged_pool.runtime.workers.pool import THREAD


def processes() -> set[int]:
    """Return their process ids."""
    return {child.pid for child in psutil.Process().children() if "runtime.workers.program" in _command(child)}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended, a moment ago or as a zombie
        return ""


def replaced() -> None:
    """Return when every process that died has its successor."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)


def prepare_zombie() -> int:
    """Let this worker process half die at SIGUSR1, and wholly at its next job. Returns its process id.

    Its main thread is a zombie then, and so is the process as others see it. Another thread lives on, so the process
    has no exit code and its pipe is open. A killed process is in this state for a moment.
    """
    leave = ctypes.CDLL(None).pthread_exit
    signal.signal(signal.SIGUSR1, lambda *_: leave(None))

    def end() -> None:
        while psutil.Process().status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
        select.select([int(sys.argv[1])], [], [])  # the pipe
        os._exit(9)

    threading.Thread(target=end, daemon=True).start()
    return os.getpid()


def make_zombie(process: int) -> None:
    """Let a process that has prepared it half die, and wait until it has."""
    os.kill(process, signal.SIGUSR1)
    while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
