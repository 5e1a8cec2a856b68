"""The same call in several threads at once: how much they get done."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """What is done for a while, and by how many threads."""

    what: T
    threads: int
    seconds: float


def per_second(call: Callable[[int], int], threads: int, seconds: float) -> float:
    """How much several threads get done a second.

    Args:
        call: Does some of the work, given the number of the call, and returns how much that was.
        threads: That call it at the same time, each again and again; every one has numbers of its own.
        seconds: After so long no call begins, but for the first one of each thread.
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
