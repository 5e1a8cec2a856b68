"""How many threads a forward is worth: waking a sleeping thread at every layer costs more than a small batch gains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from staged_pool.runtime.model import TokenIds

_SIZES: Final = (8, 16, 32, 64, 128, 256)
"""Tokens of the batches that are tried."""

_TRIES: Final = 5

_WORTH_IT: Final = 1.1
"""More threads must be quicker by this factor: they take cores from tokenizing."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Which batches run on one thread, and which on all."""

    threads: int
    alone_tokens: int
    """Batches of up to so many tokens run on one thread."""

    def use(self, tokens: int) -> None:
        """Set the calling thread's number of torch threads for a batch of so many tokens."""
        if self.threads > 1:
            torch.set_num_threads(1 if tokens <= self.alone_tokens else self.threads)


def plan_threads(threads: int, forward: Callable[[Sequence[TokenIds]], object], text: TokenIds) -> ThreadPlan:
    """Find out, by running batches of growing size both ways, from which size on more threads are quicker.

    The quickest of a few tries counts: on a machine with other work that is the one least disturbed.

    Args:
        threads: All of them.
        forward: Runs a batch on as many threads as are set.
        text: Token ids to make batches of; a size beyond them is not tried.
    """
    alone_tokens = 0
    for size in (size for size in _SIZES if threads > 1 and size <= len(text)):
        quickest = dict.fromkeys((1, threads), math.inf)
        for _ in range(_TRIES):
            for count in quickest:
                torch.set_num_threads(count)
                quickest[count] = min(quickest[count], _seconds(forward, [text[:size]]))
        if quickest[1] <= _WORTH_IT * quickest[threads]:
            alone_tokens = size
    torch.set_num_threads(threads)
    return ThreadPlan(threads, alone_tokens)


def _seconds(forward: Callable[[Sequence[TokenIds]], object], batch: Sequence[TokenIds]) -> float:
    started = time.perf_counter()
    forward(batch)
    return time.perf_counter() - started
