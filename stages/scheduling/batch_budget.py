"""The token budget of a batch: as much as the device gets done in time, and has memory for."""

from __future__ import annotations

from staged_pool.stages.scheduling.tuning import BUDGET_DECREASE, BUDGET_STEPS


class Budget:
    """Token budget of a batch, by additive increase and multiplicative decrease (Chiu and Jain, 1989).

    Pure: it is told what batches took. Batches of less than half the budget say nothing about it, and a single item of
    more than the budget says only that more can be done. A decrease for want of memory is undone step by step, as one
    for want of time is.

    Args:
        most: Never more than so many tokens.
        start: Tokens of the first batches. None: `most`.
        target_s: Longest time that a forward should take, in seconds. None: forwards may take any time.
    """

    def __init__(self, most: int, *, start: int | None = None, target_s: float | None = None) -> None:
        self._most = most
        self._target_s = target_s
        self.tokens = most if target_s is None or start is None else min(start, most)

    def observe(self, cost: int, seconds: float, *, was_limit: bool) -> None:
        """Count a batch whose forward succeeded.

        Args:
            cost: Tokens of the batch, padding included.
            seconds: Duration of its forward.
            was_limit: More waited, and would have exceeded the budget.
        """
        if 2 * cost < self.tokens:
            return
        step = max(1, self._most // BUDGET_STEPS)
        if self._target_s is not None and seconds > self._target_s:
            if cost <= self.tokens:
                self.tokens = max(min(step, self.tokens), int(self.tokens * BUDGET_DECREASE))
        elif was_limit:
            self.tokens = min(self._most, self.tokens + step)

    def out_of_memory(self, cost: int) -> None:
        """Halve the budget after a batch of so many tokens for which the device had no memory."""
        self.tokens = max(1, min(self.tokens, cost // 2))
