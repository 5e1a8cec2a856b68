"""Device slots: the batches that run on a device, and those handed over ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from staged_pool.stages.meter import StageMeter
from staged_pool.stages.scheduling.recent_mean import RecentMean
from staged_pool.stages.scheduling.service_time import DeviceShare
from staged_pool.stages.ticket import Item


@dataclass(slots=True, eq=False)
class Execution:
    """One batch on its way through the device."""

    tokens: int
    items: Sequence[Item[Any]] = ()
    began_at: float = 0.0
    """Time at which it got its slot, in seconds on the clock of the stages."""
    ended_at: float = 0.0
    """End of its last forward, as measured in the thread that ran it."""
    mark: tuple[float, float] | None = None
    """The mark of `DeviceShare` while it has a slot."""
    first_at: float = 0.0
    """Start of its first forward, as measured in the thread that ran it."""
    forward_at: float | None = None
    """Start of the forward that a thread runs now; None while none runs it."""
    forwards: int = 0
    """Number of forwards: more than one if the batch had to be run in halves."""
    out_of_memory: bool = False
    """One of the forwards ran out of device memory."""

    def forward_begins(self, now: float) -> None:
        """Count a forward; called in the thread that runs it."""
        self.forwards += 1
        self.forward_at = now
        if self.forwards == 1:
            self.first_at = now

    def forward_ends(self, now: float) -> None:
        """Note the end of a forward; called in the thread that ran it."""
        self.forward_at = None
        self.ended_at = now


class DeviceSlots:
    """Counts the batches on a device of several slots.

    A batch that is handed over ahead has no slot yet. When a slot gets free, a device thread goes on with it at once;
    the event loop counts that when it hears of the end of the earlier batch.

    Args:
        slots: Forwards at once.
        ahead: Most batches that are handed over ahead.
        meter: Meter of the stage. Its `busy` is the number of taken slots.
        clock: Clock of the stages, in seconds.
    """

    def __init__(self, slots: int, ahead: int, meter: StageMeter, clock: Callable[[], float]) -> None:
        self.slots = slots
        self._max_ahead = ahead
        self._meter = meter
        self._clock = clock
        self._share = DeviceShare()
        self.tokens = 0
        """Tokens of the batches on the device."""
        self._ahead: deque[Execution] = deque()
        self._held: set[Execution] = set()
        self._busy = RecentMean()

    @property
    def running(self) -> int:
        """Batches on the device."""
        return self._meter.busy

    @property
    def free(self) -> int:
        """Slots that are not taken."""
        return self.slots - self._meter.busy

    @property
    def ahead(self) -> int:
        """Batches that were handed over and wait for a slot."""
        return len(self._ahead)

    @property
    def may_go_ahead(self) -> bool:
        """True if one more batch may be handed over before a slot is free."""
        return len(self._ahead) < self._max_ahead

    @property
    def held(self) -> Collection[Execution]:
        """Batches on the device, and those handed over ahead."""
        return self._held

    @property
    def utilization(self) -> float:
        """Mean part of the slots that was taken in the last seconds, 0 to 1."""
        return self._busy.value(self._clock()) / self.slots

    @contextmanager
    def hold(self, tokens: int, items: Sequence[Item[Any]] = ()) -> Iterator[Execution]:
        """Hold a slot for the block, or a place ahead until a slot is free."""
        execution = Execution(tokens, items)
        self._held.add(execution)
        if self.free > 0:
            self._begin(execution, self._clock())
        else:
            self._ahead.append(execution)
        try:
            yield execution
        finally:
            self._held.discard(execution)
            self.end(execution, self._clock())

    def end(self, execution: Execution, now: float) -> float:
        """Count the end of a batch, and give its slot to the first batch ahead. Later calls do nothing.

        Returns:
            Seconds of the whole device that the batch took.
        """
        if execution in self._ahead:
            self._ahead.remove(execution)
            if execution.forwards:  # it ran in the slot of a batch whose end comes after this one
                self._begin(execution, execution.first_at)
        if execution.mark is None:
            return 0.0
        device_s = self._share.end(now, execution.mark)
        execution.mark = None
        self._meter.ended(now)
        self._busy.set_level(self._meter.busy, now)
        self.tokens -= execution.tokens
        if self._ahead and self.free > 0:  # one slot is free again
            self._begin(self._ahead.popleft(), now)
        return device_s

    def _begin(self, execution: Execution, now: float) -> None:
        execution.began_at = now
        execution.mark = self._share.begin(now)
        self._meter.began(now)
        self._busy.set_level(self._meter.busy, now)
        self.tokens += execution.tokens
