"""Whether what waits for the device is worth a forward of its own now, or had better wait for company."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from staged_pool.stages.forming import BatchBuilder

COMPANY_S: Final = 0.002
"""For how long less than a share waits for what is being prepared, in seconds. Short texts take a tenth of it, and a
small forward some 6 ms more than its part of a larger one (two cores of a Zen 3)."""


class Company:
    """Knows which small forwards run, and what is on its way to the waiting room.

    Args:
        builder: The waiting room.
        waiting_tokens: It takes in no more while so many are in it.
        coming: How many lists are being prepared, or are on their way: they will be waiting in a moment.
        gathers: Whether the slots share a device on which a small forward takes nearly as long as one of some more
            tokens, so that less than one that runs waits for company, and what could go alone a moment for what is
            being prepared.
        cores: What the forwards share with preparing, one each. None: the device has its own, and waits for none.
        clock: The event loop's, in seconds.
    """

    def __init__(
        self,
        builder: BatchBuilder[Any],
        *,
        waiting_tokens: int,
        coming: Callable[[], int],
        gathers: bool,
        cores: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._builder = builder
        self._waiting_tokens = waiting_tokens
        self._coming = coming
        self._gathers = gathers
        self._cores = cores
        self._clock = clock
        self._small: list[int] = []
        """Tokens of each forward of less than a share that runs, where these gather."""
        self._until = inf
        """When less than a share no longer waits for what is being prepared. Infinite: it does not wait yet."""

    def begin(self, tokens: int) -> None:
        """A forward of so many tokens runs."""
        if self._is_small(tokens):
            self._small.append(tokens)

    def end(self, tokens: int) -> None:
        """It has ended."""
        if self._is_small(tokens):
            self._small.remove(tokens)

    def worth_waiting_s(self, running: int) -> float:
        """How long what waits had better wait, in seconds. 0: it is to go. Infinite: until more has come, or one of the
        forwards that run ends.

        Where small batches gather, less than a share waits beside one of less than a share until it is as much.
        Where they share the cores with preparing, it waits a moment for what is being prepared: a forward without that
        would keep that waiting, or share the cores with another one, and take nearly as long as one of both.
        Where forwards and preparing keep all cores busy, one forward more could only take a core from those, and what
        they prepare meanwhile makes it a better one.

        Args:
            running: Forwards that run.
        """
        cost = self._builder.cost
        if cost >= self._builder.min_share:
            return 0.0
        if cost >= self._waiting_tokens:  # more has no room here before this has gone
            return 0.0
        if self._small and cost < min(self._small):
            return inf
        if self._cores is None or not (coming := self._coming()):
            return 0.0
        if running and running + coming >= self._cores:
            return inf
        return self._moment_s() if self._gathers and self._builder else 0.0

    def has_gone(self) -> None:
        """What waited is on its way to the device."""
        self._until = inf

    def _moment_s(self) -> float:
        """What is left of the moment for what is being prepared."""
        now = self._clock()
        if self._until == inf:
            self._until = now + COMPANY_S
        return max(0.0, self._until - now)

    def _is_small(self, tokens: int) -> bool:
        return self._gathers and tokens < self._builder.min_share
