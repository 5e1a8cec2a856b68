"""Batch delay: start a partial batch now, or wait briefly for items that are almost ready."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from staged_pool.stages.scheduling.service_time import ServiceTimeModel


class BatchDelay:
    """One rule, which makes the sum of all waits least.

    W items wait, and C more will be ready in t seconds. A forward takes F seconds whatever its size, and c more for the
    C items. Started now, the W items are done after F, and the C items after another F behind that. Started in t
    seconds, all are done by one forward: each of the W waits t + c longer, and each of the C waits F - t less. So the
    batch waits as long as C (F - t) > W (t + c).

    Args:
        service_time: Of the device: F, and the seconds of each token.
        ready_s: Seconds that preparing takes, as measured lately.
        clock: Of the stages, in seconds.
    """

    def __init__(
        self, service_time: ServiceTimeModel, ready_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._service_time = service_time
        self._ready_s = ready_s
        self._clock = clock
        self._until = inf
        """End of the wait of what waits now. Infinite: it has not begun."""

    def delay_s(self, waiting: int, tokens: int, coming: int) -> float:
        """Seconds to wait for what is coming; 0 to start now.

        Args:
            waiting: Items that wait.
            tokens: Of these.
            coming: Items that are being prepared, or are on their way.
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
        """What waits now has waited for as long as it was to."""
        return self._until == -inf

    def over(self) -> None:
        """End the wait, whatever the clock says: it was waited for."""
        self._until = -inf

    def started(self) -> None:
        """Count the start of a batch: whatever waits next begins its own wait."""
        self._until = inf
