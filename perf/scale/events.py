"""Virtual time: events, stations with queues, and lines with credits. Everything is deterministic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

Call = Callable[[], object]


class Events:
    """Calls in the order of their times. Calls of one time keep the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self._heap: list[tuple[float, int, Call]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Call) -> None:
        """Plan a call."""
        heappush(self._heap, (self.now + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Run until no call is planned."""
        while self._heap:
            self.now, _, call = heappop(self._heap)
            call()


class Station:
    """Servers with one queue, first come first served: an event loop is a station of one server.

    Args:
        events: Virtual time.
        servers: Jobs that are served at once.
    """

    def __init__(self, events: Events, servers: int = 1) -> None:
        self._events = events
        self._servers = servers
        self._waiting: deque[tuple[float, Call]] = deque()
        self.busy = 0
        """Jobs that are being served."""
        self.busy_s = 0.0
        """Seconds of service of all jobs so far."""

    def submit(self, seconds: float, then: Call) -> None:
        """Add a job of some seconds of service, and a call for its end."""
        self._waiting.append((seconds, then))
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.busy < self._servers:
            seconds, then = self._waiting.popleft()
            self.busy += 1
            self.busy_s += seconds
            self._events.after(seconds, lambda then=then: self._end(then))  # type: ignore[misc]

    def _end(self, then: Call) -> None:
        self.busy -= 1
        then()
        self._serve()


class Gathering(Generic[T]):
    """Workers that take all lists that wait, up to a number of items: the rule of `PreprocessStage`.

    Args:
        events: Virtual time.
        workers: Calls at once.
        chunk_items: Items after which a worker takes no further list.
        seconds: Returns the seconds of a call.
        then: Takes the items of a call at its end.
    """

    def __init__(
        self,
        events: Events,
        workers: int,
        chunk_items: int,
        seconds: Callable[[list[T]], float],
        then: Callable[[list[T]], object],
    ) -> None:
        self._events = events
        self._workers = workers
        self._chunk_items = chunk_items
        self._seconds = seconds
        self._then = then
        self._lists: deque[list[T]] = deque()
        self._busy = 0
        self.preparing = 0
        """Items in calls."""
        self.call_s = 0.0
        """Seconds of the last call."""
        self.busy_s = 0.0
        """Seconds of all calls so far."""

    def add(self, items: list[T]) -> None:
        """Add a list."""
        self._lists.append(items)
        self._serve()

    def _serve(self) -> None:
        while self._lists and self._busy < self._workers:
            items = self._lists.popleft()
            while self._lists and len(items) < self._chunk_items:
                items = items + self._lists.popleft()
            self.call_s = seconds = self._seconds(items)
            self._busy += 1
            self.preparing += len(items)
            self.busy_s += seconds
            self._events.after(seconds, lambda items=items: self._end(items))  # type: ignore[misc]

    def _end(self, items: list[T]) -> None:
        self._busy -= 1
        self.preparing -= len(items)
        self._then(items)
        self._serve()


class Credits:
    """Credits of a line: a sender waits for one, in order, and the receiver gives it back.

    Args:
        credits: Messages that may be on their way.
    """

    def __init__(self, credits: int) -> None:
        self._left = credits
        self._waiting: deque[Call] = deque()
        self.out = 0
        """Credits that are taken."""
        self.most_out = 0
        """Largest number of credits that were taken at once."""

    def take(self, then: Call) -> None:
        """Call `then` with a credit, now or later."""
        self._waiting.append(then)
        self._grant()

    def give_back(self) -> None:
        """Give one credit back."""
        self._left += 1
        self.out -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._left:
            self._left -= 1
            self.out += 1
            self.most_out = max(self.most_out, self.out)
            self._waiting.popleft()()
