"""Processes of worker pools that run beside a test."""

from __future__ import annotations

import threading

import psutil

from staged_pool.runtime.workers.pool import THREAD


def processes() -> set[int]:
    """Return their process ids."""
    return {
        child.pid for child in psutil.Process().children() if "runtime.workers.program" in " ".join(child.cmdline())
    }


def replaced() -> None:
    """Return when every process that died has its successor."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)
