"""Loads of hostile folders, with bounds on memory and time."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOM_BYTES: Final = 2 * 2**30
"""Address space that a load may take beside what the process has: a hundred times what a tiny model needs."""

MOST_S: Final = 10.0
"""Most processor time of a load, in seconds: tens of times what a tiny model needs, and no measurement."""


@contextmanager
def little_room() -> Iterator[None]:
    """Give a block little memory, and fail if it computes for long."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    began = time.thread_time()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.thread_time() - began < MOST_S
