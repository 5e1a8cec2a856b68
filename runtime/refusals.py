"""Rejections at the door, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from staged_pool.stages.errors import Overloaded

EXPECTED_S: Final = 0.1
"""For how long after a rejection more are expected: at twice what can be served, one comes every millisecond or so."""


class Refusal(NamedTuple):
    """Why nothing more is let in."""

    limit: str
    """What is reached, as metrics call it."""
    error: Overloaded


class Refusals:
    """The rejections of one door.

    Args:
        clock: The event loop's, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        """Since the start, by limit."""
        self._clock = clock
        self._last_at = 0.0

    def count(self, limit: str) -> None:
        """One request is rejected because of `limit`."""
        self.counts[limit] += 1
        self._last_at = self._clock()

    def counted(self, refusal: Refusal) -> Overloaded:
        """Count a rejection, and return what its caller is told."""
        self.count(refusal.limit)
        return refusal.error

    def are_expected(self) -> bool:
        """The last one is so recent that more are expected."""
        return bool(self.counts) and self._clock() - self._last_at < EXPECTED_S
