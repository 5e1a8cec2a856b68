"""Device slots: the batches that run, the batches that are handed over ahead, and how much of the device each has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from staged_pool.stages.meter import StageMeter
from staged_pool.stages.scheduling.service_time import DeviceShare


@dataclass(slots=True, eq=False)
class Execution:
    """A batch's time on the device."""

    tokens: int
    began_at: float = 0.0
    """Start of its forward, in seconds on the clock of the stages."""
    ended_at: float = 0.0
    """End of its last forward, as the thread that ran it saw it."""
    mark: tuple[float, float] | None = None
    """Mark of `DeviceShare`, while it runs."""
    first_at: float = 0.0
    """Start of its first forward, as the thread that ran it saw it."""
    forwards: int = 0
    """More than one where items had to be told apart, or the device had no memory for all."""
    out_of_memory: bool = False
    """The device had no memory for one of them."""

    def forward_begins(self, now: float) -> None:
        """Count a forward; called in the thread that runs it."""
        self.forwards += 1
        if self.forwards == 1:
            self.first_at = now


class DeviceSlots:
    """Counts what runs on a device of several slots.

    A batch that is handed over ahead has no slot yet. The device's thread goes on with it by itself when one is free,
    which is counted when the end of the batch before is told.

    Args:
        slots: Forwards at once.
        ahead: Most batches that are handed over ahead.
        meter: Of the stage: counts the slots that are taken.
        clock: Of the stages, in seconds.
    """

    def __init__(self, slots: int, ahead: int, meter: StageMeter, clock: Callable[[], float]) -> None:
        self.slots = slots
        self._most_ahead = ahead
        self._meter = meter
        self._clock = clock
        self._share = DeviceShare()
        self.tokens = 0
        """Tokens of the batches on the device."""
        self._ahead: deque[Execution] = deque()

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
        """Batches that are handed over and wait for a slot."""
        return len(self._ahead)

    @property
    def may_go_ahead(self) -> bool:
        """One more batch may be handed over before a slot is free."""
        return len(self._ahead) < self._most_ahead

    @contextmanager
    def hold(self, tokens: int) -> Iterator[Execution]:
        """A block in which a batch has a slot, or the place ahead, which becomes a slot when the next one is free."""
        execution = Execution(tokens)
        if self.free > 0:
            self._begin(execution, self._clock())
        else:
            self._ahead.append(execution)
        try:
            yield execution
        finally:
            self.end(execution, self._clock())

    def end(self, execution: Execution, now: float) -> float:
        """Count the end of a batch, and the beginning of the one that was ahead. Once: later calls count nothing.

        Returns:
            Seconds of the whole device that it took.
        """
        if execution in self._ahead:
            self._ahead.remove(execution)
            if execution.forwards:  # two ends are told at once, and this one first: it had taken over a slot
                self._begin(execution, execution.first_at)
        if execution.mark is None:
            return 0.0
        device_s = self._share.end(now, execution.mark)
        execution.mark = None
        self._meter.busy -= 1
        self.tokens -= execution.tokens
        while self._ahead and self.free > 0:
            self._begin(self._ahead.popleft(), now)
        return device_s

    def _begin(self, execution: Execution, now: float) -> None:
        execution.began_at = now
        execution.mark = self._share.begin(now)
        self._meter.busy += 1
        self.tokens += execution.tokens
