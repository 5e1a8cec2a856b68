"""Items of one request that wait to be let in: parts of other items first."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from staged_pool.runtime.pipelines.moving import Moving
from staged_pool.stages.wakeup import Wakeup, wakeup


@dataclass(slots=True, order=True)
class Waiting:
    """An item that waits to be let in."""

    rank: tuple[int, int]
    item: Moving = field(compare=False)
    place: int = field(compare=False)
    """Number of the stage, in its segment, that it goes to."""
    let_in: Wakeup = field(compare=False, default_factory=wakeup)


class PendingItems:
    """Items of one request that wait for places: those that are furthest go first, and then the one that came first.

    Parts of an item are in memory already, so they go before new items. The window knows nothing of that: it shares its
    places between requests, and each request uses its own.
    """

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._added = 0

    def add(self, item: Moving, place: int) -> Waiting:
        """Add an item that goes to a stage of its segment."""
        waiting = Waiting((-place, self._added), item, place)
        self._added += 1
        heappush(self._heap, waiting)
        return waiting

    def take(self) -> Waiting:
        """Take the first item, for which there is a place."""
        waiting = heappop(self._heap)
        waiting.let_in.set()
        return waiting
