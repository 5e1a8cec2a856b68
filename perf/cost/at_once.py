"""Throughput of the same call in several threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """One block of work: its argument, number of threads and length in seconds."""

    what: T
    threads: int
    seconds: float


def per_second(call: Callable[[int], int], threads: int, seconds: float) -> float:
    """Return the units of work done per second by several threads.

    Args:
        call: Does some work, given the number of the call; returns its units.
        threads: Number of threads that call it repeatedly; each has numbers of its own.
        seconds: Time after which no call begins; each thread makes at least one.
    """
    began = time.perf_counter()

    def loop(place: int) -> float:
        done, number = 0, place
        while not done or time.perf_counter() - began < seconds:
            done += call(number)
            number += threads
        # Threads do not end together: each has its own time, or the last ones would seem to have worked alone.
        return done / (time.perf_counter() - began)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(loop, range(threads)))
