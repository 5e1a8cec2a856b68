"""How many threads a forward is worth, and how many forwards at once the threads are.

Threads that share a forward meet at every layer: each waits there for the slowest, and a sleeping one has to be woken.
A small batch loses more by that than it gains, and where other threads use the same cores a large one does too.
Forwards beside each other never wait for each other.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from staged_pool.runtime.threads import is_first

SIZES: Final = (8, 16, 32, 64, 128, 256)
"""Tokens of the batches that are tried."""

_TRIES: Final = 3
_SITTINGS: Final = 2
"""Of so many tries each, at most."""

_ALONE_PRODUCTS: Final = 400_000_000
"""Multiplications of a batch from which on more threads are worth it: MiniLM on two cores of a Zen 4, 32 tokens."""

_WORTH_IT: Final = 1.1
"""More threads must be quicker by this factor: they take cores from tokenizing."""

_REST_S: Final = 0.02
"""Before each of the tries. A system that packs threads onto few cores while little goes on gives one that is woken
behind a rest the core of the one that wakes it, and sees only milliseconds later that both are busy."""

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
    """Which batches run on one thread, and which on all.

    The size of a batch decides, and nothing that depends on the time: with other threads a forward may give other bits.
    """

    threads: int
    alone_tokens: int
    """Batches of up to so many tokens run on one thread."""
    always_alone: bool = False
    """Every forward runs on one thread, whatever else runs."""

    def use(self, tokens: int, at_once: int = 1) -> None:
        """Set the calling thread's number of torch threads.

        Args:
            tokens: Of the batch that it will run.
            at_once: Batches that share the threads.
        """
        # Also where there is but one: a thread that was never told begins with as many as there are cores.
        use_threads(1 if self.always_alone or tokens <= self.alone_tokens else self._share(at_once))

    def use_most(self) -> None:
        """Set as many as a forward will ever get from the calling thread."""
        use_threads(1 if self.always_alone else self._share(1))

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


def alone_tokens(threads: int, forward: Callable[[Sequence[int]], object], longest: int) -> int:
    """Find out, by running batches of growing size both ways, up to which size one thread is as quick as all.

    Each try follows a rest, as a request does that comes by itself. The quickest of a few tries counts: on a machine
    with other work that is the one least disturbed. More threads are disturbed more easily, so that they are not
    quicker has to be seen twice.

    Args:
        threads: All of them.
        forward: Runs a batch of inputs of so many tokens each, on as many threads as are set.
        longest: Tokens of the longest input; a size beyond it is not tried.

    Returns:
        Tokens: 0, or one of the sizes that are tried.
    """
    sizes = [size for size in SIZES if threads > 1 and size <= longest]
    place = bisect_left(sizes, True, key=partial(_gains, threads, forward))
    use_threads(threads)
    return [0, *sizes][place]


def usual_alone_tokens(parameters: int, longest: int) -> int:
    """The same by the size of the model, without trying: threads gain from some 0.8 GFLOP on.

    Args:
        parameters: Of the model, each of which is a multiplication and a sum for a token.
        longest: Tokens of the longest input.
    """
    return max((size for size in SIZES if size <= longest and size * parameters < _ALONE_PRODUCTS), default=0)


def usual_workers(threads: int) -> int:
    """How many forwards at once get most done on most machines."""
    return max(workers for workers in WORKERS if workers == 1 or workers**2 <= 2 * threads)


def _gains(threads: int, forward: Callable[[Sequence[int]], object], size: int) -> bool:
    """So many threads are quicker than one with a batch of one input of this size, which follows a rest."""
    quickest = dict.fromkeys((1, threads), math.inf)
    for _ in range(_SITTINGS):
        for _ in range(_TRIES):
            for count in quickest:
                use_threads(count)
                time.sleep(_REST_S)
                quickest[count] = min(quickest[count], _seconds(forward, [size]))
        if quickest[1] > _WORTH_IT * quickest[threads]:
            return True
    return False


def plan_workers(threads: int, forward: Callable[[Sequence[int]], object], longest: int) -> int:
    """Find out, by running the same batches in different ways, how many forwards at once get most done.

    The quickest of a few tries counts, as for `alone_tokens`. That one at a time gets more done is confirmed by as many
    again: it is rare, and one slow moment of the machine must not decide about all the time that the model is served.

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


def _seconds(forward: Callable[[Sequence[int]], object], batch: Sequence[int]) -> float:
    started = time.perf_counter()
    forward(batch)
    return time.perf_counter() - started
