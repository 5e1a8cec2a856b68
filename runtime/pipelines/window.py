"""Windows: a limited number of items at once, and the others in fair order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from staged_pool.stages.scheduling.entries import Claim
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.wakeup import Wakeup, wakeup


@dataclass(slots=True, eq=False)
class _Turn:
    """An item that waits for a place, as an entry of the fair queue."""

    ticket: Claim
    woken: Wakeup = field(default_factory=wakeup)
    has_place: bool = False
    tokens: Final = 1
    batch_key: Final[Hashable] = None


class Window:
    """At most `limit` items at once. Others wait, in the fair order of priorities, tenants and requests.

    Args:
        name: Name of the window among those of a pipeline.
        limit: Number of places.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        """Places that are taken."""
        self._queue = FairQueue[_Turn](("window", name))

    @property
    def waiting(self) -> int:
        """Number of items that wait for a place."""
        return len(self._queue)

    async def enter(self, claim: Claim) -> None:
        """Take a place for a request, as soon as there is one."""
        if self.taken < self.limit and not self.waiting:
            self.taken += 1
            return
        turn = _Turn(claim)
        self._queue.add(turn)
        try:
            await turn.woken.wait()
        except BaseException:
            if turn.has_place:
                self.leave()
            else:
                self._queue.drop((turn,))
            raise

    def leave(self) -> None:
        """Give a place back, to the next item that waits."""
        self.taken -= 1
        while self.taken < self.limit and (turn := self._queue.first(_always)) is not None:
            self._queue.take(turn)
            self._queue.end_round()
            self.taken += 1
            turn.has_place = True
            turn.woken.set()

    def place(self, claim: Claim) -> WindowPlace:
        """Return a block that has a place."""
        return WindowPlace(self, claim)


class WindowPlace:
    """The block of `Window.place`."""

    __slots__ = ("_claim", "_window")

    def __init__(self, window: Window, claim: Claim) -> None:
        self._window = window
        self._claim = claim

    async def __aenter__(self) -> None:
        await self._window.enter(self._claim)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.leave()


def _always(_: object) -> bool:
    return True
