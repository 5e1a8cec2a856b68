"""The number of torch threads that a forward gets, and the number of forwards at once.

A forward that is alone has all cores. Threads that share a forward meet at every layer, where each waits for the
slowest. Forwards beside each other never wait for each other, so several forwards at once may get more done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from staged_pool.runtime.threads import is_first

WORKERS: Final = (1, 2, 4)
"""Forwards at once that are tried. With more, each batch takes so long that requests wait for it."""

_WORKER_TEXTS: Final = 8
"""Texts of the batches that forwards at once are tried with."""

_WORKER_TEXT_TOKENS: Final = 64

_WORKER_TRIES: Final = 3

_LONG_ENOUGH_S: Final = 1.5
"""After which they are tried no more: what takes so long is not easily disturbed."""

_WORTH_ONE: Final = 1.05
"""One forward at a time must get so much more done: whatever interrupts one of its threads holds up all of them, and
how often that will happen is not seen at load."""


def use_threads(count: int) -> None:
    """Set the calling thread's number of torch threads.

    With its first operation a thread gets the number that any thread has set last, even where it has set its own. So it
    is asked for it before: else one that was to run alone now and then gets a thread to share with, which it keeps. Two
    such threads on two cores are one more than libgomp lets spin, and a short text takes 8 ms instead of 5.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """The torch threads of each forward.

    Forwards at once share the cores, and nothing else counts: with other threads a forward may give other bits.
    """

    threads: int
    always_alone: bool = False
    """Every forward runs on one thread, whatever else runs."""

    def use(self, at_once: int = 1) -> None:
        """Set the calling thread's number of torch threads.

        Args:
            at_once: Forwards that share the threads, with the one that the calling thread will run.
        """
        # Also where there is but one: a thread that was never told begins with as many as there are cores.
        use_threads(1 if self.always_alone else self._share(at_once))

    def _share(self, at_once: int) -> int:
        # A thread that shares its forwards keeps others for that, which hardly spin before they sleep where there are
        # more of them than cores. So only one has enough for all cores: that which gets the forwards that are alone.
        return max(1, self.threads // (at_once if is_first() else max(2, at_once)))


@contextmanager
def threads_kept() -> Iterator[None]:
    """A block that sets the calling thread's number of torch threads; afterwards it is what it was."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def usual_workers(threads: int) -> int:
    """How many forwards at once get most done on most machines."""
    return max(workers for workers in WORKERS if workers == 1 or workers**2 <= 2 * threads)


def plan_workers(threads: int, forward: Callable[[Sequence[int]], object], longest: int) -> int:
    """Find out, by running the same batches in different ways, how many forwards at once get most done.

    The quickest of a few tries counts. That one at a time gets more done is confirmed by as many again: it is rare, and
    one slow moment of the machine must not decide about all the time that the model is served.

    Args:
        threads: What the forwards share.
        forward: Runs a batch of inputs of so many tokens each, on as many threads as are set for the thread that calls
            it.
        longest: Tokens of the longest input.
    """
    batch = [min(_WORKER_TEXT_TOKENS, longest)] * _WORKER_TEXTS
    choices = [workers for workers in WORKERS if workers <= threads]
    if len(choices) < 2:
        return 1
    quickest = dict.fromkeys(choices, math.inf)
    best = choices[-1]
    for _ in ("at first", "to confirm that it is one"):
        began = time.perf_counter()
        for _ in range(_WORKER_TRIES):
            for workers in choices:
                seconds = _seconds_at_once(forward, batch, workers, threads // workers, batches=choices[-1])
                quickest[workers] = min(quickest[workers], seconds)
            if time.perf_counter() - began > _LONG_ENOUGH_S:
                break
        best = min(choices[1:], key=lambda workers: quickest[workers])
        if quickest[best] <= _WORTH_ONE * quickest[1]:
            return best
    return 1


def _seconds_at_once(
    forward: Callable[[Sequence[int]], object],
    batch: Sequence[int],
    workers: int,
    threads: int,
    *,
    batches: int,
) -> float:
    """How long so many batches take, in so many workers of so many torch threads each."""

    def work(_: int) -> tuple[float, float]:
        use_threads(threads)
        forward(batch)  # what a thread needs once is not counted
        started = time.perf_counter()
        for _ in range(batches // workers):
            forward(batch)
        return started, time.perf_counter()

    with ThreadPoolExecutor(workers) as pool:
        times = list(pool.map(work, range(workers)))
    return max(ended for _, ended in times) - min(started for started, _ in times)
