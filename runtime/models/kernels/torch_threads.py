"""Torch threads of each forward, and the number of concurrent forwards.

A forward that runs alone gets all cores, unless it is short. Threads that share a forward wait for the slowest at every
layer, and a sleeping thread has to be woken. Concurrent forwards never wait for each other, so several of them may have
a higher throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from staged_pool.runtime.threads.worker import is_first

WORKERS: Final = (1, 2, 4)
"""Possible numbers of concurrent forwards. With more, each batch takes so long that requests wait for it."""

SHARED_PRODUCTS: Final = 400_000_000
"""Multiplications from which a forward gets more than one thread: 37 tokens of MiniLM.

A shorter forward ends sooner than a second thread wakes. perf/NOTES.md has the times."""


def use_threads(count: int) -> None:
    """Set the calling thread's number of torch threads."""
    # In its first operation, torch gives a thread the number that any thread has set last, even after the thread has
    # set its own. Reading the number counts as that first operation.
    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Number of torch threads of each forward.

    It depends only on the size of the forward and on those beside it: another number may give other bits.
    """

    threads: int
    short_tokens: int = 0
    """Forwards of at most this many tokens run on one thread."""
    always_alone: bool = False
    """Every forward runs on one thread."""

    def use(self, tokens: int, at_once: int = 1) -> None:
        """Set the calling thread's number of torch threads.

        Args:
            tokens: Tokens of the next forward of the calling thread.
            at_once: Concurrent forwards that share the threads, this one included.
        """
        # Set it even for a plan of one thread: a new thread begins with one for each core.
        use_threads(1 if self.always_alone or tokens <= self.short_tokens else self._share(at_once))

    def _share(self, at_once: int) -> int:
        # Each calling thread keeps its own OpenMP team. If all teams together have more threads than cores, libgomp
        # makes them sleep almost at once. So only the first thread, which gets lone forwards, has a team for all cores.
        return max(1, self.threads // (at_once if is_first() else max(2, at_once)))


@contextmanager
def restore_threads() -> Iterator[None]:
    """Restore the calling thread's number of torch threads after the block."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def short_tokens(weights: int) -> int:
    """Return the largest forward, in tokens, that one thread runs as fast as several.

    Args:
        weights: Number of weights that each token is multiplied by.
    """
    return SHARED_PRODUCTS // weights if weights else 0


def default_workers(threads: int) -> int:
    """Return the number of concurrent forwards with the highest throughput.

    Args:
        threads: Number of torch threads.
    """
    return max(workers for workers in WORKERS if workers == 1 or workers**2 <= 2 * threads)
