"""Batch delay: start a partial batch now, or wait briefly for items that are almost ready."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from staged_pool.stages.scheduling.service_time import ServiceTimeModel


class BatchDelay:
    """Decides between starting a batch and waiting.

    The rule minimises the sum of all waits. W items wait, and C more will be ready in t seconds. A forward takes F
    seconds of any size, and c more for the C items. If it starts now, the W items are done after F, and the C items
    another F later. If it starts in t seconds, one forward does all: each of the W items waits t + c longer, and each
    of the C items F - t less. So the batch waits while C (F - t) > W (t + c).

    Args:
        service_time: Service time of the device: F, and the seconds of each token.
        ready_s: Returns the recent mean duration of a preprocess call, in seconds.
        clock: Clock of the stages, in seconds.
    """

    def __init__(
        self, service_time: ServiceTimeModel, ready_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._service_time = service_time
        self._ready_s = ready_s
        self._clock = clock
        self._until = inf
        """End of the present delay. Infinite: none has begun; minus infinite: it is over."""

    def delay_s(self, waiting: int, tokens: int, coming: int) -> float:
        """Return the seconds to wait for items that are being prepared; 0 to start now.

        Args:
            waiting: Items that wait for the device.
            tokens: Tokens of these items.
            coming: Items that are being prepared.
        """
        if not waiting or not coming:
            return 0.0
        now, ready_s = self._clock(), self._ready_s()
        left_s = (self._until - now) if self._until < inf else ready_s
        coming_s = self._service_time.each_s * coming * tokens / waiting
        if left_s <= 0 or coming * (self._service_time.fixed_s - left_s) <= waiting * (left_s + coming_s):
            return 0.0
        self._until = now + left_s
        return left_s

    @property
    def is_over(self) -> bool:
        """True if the present items have waited for their whole delay."""
        return self._until == -inf

    def over(self) -> None:
        """End the delay: its time has passed, even if the clock is a little behind."""
        self._until = -inf

    def started(self) -> None:
        """Reset the delay at the start of a batch: items that come later get their own."""
        self._until = inf
