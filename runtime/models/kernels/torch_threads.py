"""The number of torch threads that a forward gets, and the number of forwards at once.

A forward that is alone has all cores, unless it is short. Threads that share a forward meet at every layer, where each
waits for the slowest, and one that sleeps has to be woken. Forwards beside each other never wait for each other, so
several forwards at once may get more done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from staged_pool.runtime.threads.workers import is_first

WORKERS: Final = (1, 2, 4)
"""Forwards at once. With more, each batch takes so long that requests wait for it."""


SHARED_PRODUCTS: Final = 400_000_000
"""Multiplications of a forward from which on more threads than one are worth it: 37 tokens of MiniLM. A text of 12
tokens that comes every 40 ms has its answer in 10 ms from one thread, and in 14 to 16 ms from two, of which one has to
be woken each time (two cores of a virtual machine)."""


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

    The size of a forward and those beside it decide, and nothing else: with other threads it may give other bits.
    """

    threads: int
    short_tokens: int = 0
    """Forwards of up to so many tokens run on one thread."""
    always_alone: bool = False
    """Every forward runs on one thread, whatever else runs."""

    def use(self, tokens: int, at_once: int = 1) -> None:
        """Set the calling thread's number of torch threads.

        Args:
            tokens: Of the forward that the calling thread will run.
            at_once: Forwards that share the threads, this one included.
        """
        # Also where there is but one: a thread that was never told begins with as many as there are cores.
        use_threads(1 if self.always_alone or tokens <= self.short_tokens else self._share(at_once))

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


def short_tokens(weights: int) -> int:
    """Return the most tokens of a forward that one thread does as quickly as several.

    Args:
        weights: That each token is multiplied by.
    """
    return SHARED_PRODUCTS // weights if weights else 0


def usual_workers(threads: int) -> int:
    """Return the number of forwards at once that get most done, by the number of torch threads."""
    return max(workers for workers in WORKERS if workers == 1 or workers**2 <= 2 * threads)
