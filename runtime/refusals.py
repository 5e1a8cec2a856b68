"""Refusals at the door, counted; and those that stand for a moment, so that what is like them need not be judged.

Under ten times the load that can be served, judging every request cost a fiftieth of the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from staged_pool.runtime.estimates import magnitude
from staged_pool.stages.errors import Overloaded

STANDS: Final = 0.02
"""Of the target delay: how long a refusal stands, unless somebody leaves before."""

LIKE: Final = 7 / 8
"""How small a body may be beside the one that was refused, to be refused as it was."""

EXPECTED_S: Final = 0.1
"""For how long after a refusal more are expected: at twice what can be served, one comes every millisecond or so."""

MOST_STANDING: Final = 64
"""Refusals that stand. Tenants are as many as clients like."""


class Refusal(NamedTuple):
    """Why nothing more is let in."""

    limit: str
    """What is reached, as metrics call it."""
    error: Overloaded


class Refusals:
    """The refusals of one door.

    Args:
        clock: The event loop's, in seconds.
        target_delay_s: Of the door.
    """

    def __init__(self, clock: Callable[[], float], target_delay_s: float) -> None:
        self.counts: Counter[str] = Counter()
        """Since the start, by limit."""
        self.clock = clock
        self.departures = 0
        """How often somebody has left; a refusal stands until then."""
        self._last_at = 0.0
        self._stand_s = STANDS * target_delay_s
        self._standing: dict[tuple[Hashable, int], Standing] = {}
        """By who asks, and the magnitude of what is sent."""

    def count(self, limit: str) -> None:
        """One request is refused because of `limit`."""
        self.counts[limit] += 1
        self._last_at = self.clock()

    def counted(self, refusal: Refusal) -> Overloaded:
        """What one request is told."""
        self.count(refusal.limit)
        return refusal.error

    def are_expected(self) -> bool:
        """Whether the last one is so recent that more are expected."""
        return bool(self.counts) and self.clock() - self._last_at < EXPECTED_S

    def lapse(self) -> None:
        """Somebody leaves: there is room, and nothing stands any more."""
        self.departures += 1

    def again(self, asker: Hashable, body_bytes: int) -> Standing | None:
        """Refuse a request of so many bytes, as one like it has been. None: it is to be judged."""
        standing = self._standing.get((asker, magnitude(body_bytes)))
        return standing if standing is not None and standing.again(body_bytes) else None

    def stand(self, refusal: Refusal, asker: Hashable, body_bytes: int) -> Standing:
        """Refuse a request of so many bytes, and for a moment what is like it."""
        if len(self._standing) >= MOST_STANDING:
            self._standing.clear()
        standing = Standing(self, refusal, body_bytes, self.clock() + self._stand_s)
        self._standing[asker, magnitude(body_bytes)] = standing
        self.counted(refusal)
        return standing


class Standing:
    """A refusal that is also said to what is like the request that it was made for, by the same asker."""

    __slots__ = ("_departures", "_least_bytes", "_most_bytes", "_refusal", "_refusals", "_until")

    def __init__(self, refusals: Refusals, refusal: Refusal, body_bytes: int, until: float) -> None:
        self._refusals = refusals
        self._refusal = refusal
        self._departures = refusals.departures
        self._until = until
        alike = magnitude(body_bytes)
        self._least_bytes = max(LIKE * body_bytes, 4.0 ** (alike - 1))
        self._most_bytes = 4**alike - 1

    @property
    def error(self) -> Overloaded:
        """What is wrong."""
        return self._refusal.error

    def again(self, body_bytes: int) -> bool:
        """Refuse one request more. False: it is to be judged, and was not counted."""
        refusals = self._refusals
        stands = (
            self._departures == refusals.departures
            and self._least_bytes <= body_bytes <= self._most_bytes
            and refusals.clock() <= self._until
        )
        if stands:
            refusals.counted(self._refusal)
        return stands
