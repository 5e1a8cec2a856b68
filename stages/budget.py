"""How many tokens a batch may have: as many as the device gets done in the time that a forward is to take."""

from __future__ import annotations

from typing import Final

_STEPS: Final = 32
"""In which the budget grows from nothing to the most."""

_DECREASE: Final = 0.8


class Budget:
    """Token budget of a batch at most, by additive increase and multiplicative decrease (Chiu and Jain, 1989).

    Pure: it is told what batches took. Those of less than half the budget say nothing of it, neither do those that were
    cut under a larger one; and one that was quick is a reason for more only if more waited.

    Args:
        most: Never more than so many tokens.
        start: Tokens of the first batches.
        target_s: What a forward is to take at most, in seconds. None: the budget is `most`.
    """

    def __init__(self, most: int, *, start: int | None = None, target_s: float | None = None) -> None:
        self._most = most
        self._target_s = target_s
        self.tokens = most if target_s is None or start is None else min(start, most)

    def observe(self, cost: int, seconds: float, *, was_limit: bool) -> None:
        """Count a batch of so many tokens, padding included, whose forward took so long.

        Args:
            cost: Of the batch.
            seconds: Of its forward.
            was_limit: Whether more waited, that would have exceeded the budget.
        """
        if self._target_s is None or not self.tokens <= 2 * cost <= 2 * self.tokens:
            return
        step = max(1, self._most // _STEPS)
        if seconds > self._target_s:
            self.tokens = max(min(step, self.tokens), int(self.tokens * _DECREASE))
        elif was_limit:
            self.tokens = min(self._most, self.tokens + step)

    def out_of_memory(self, cost: int) -> None:
        """The device had no room for a batch of so many tokens: from now on there is at most half of that in one."""
        self._most = max(1, min(self._most, cost // 2))
        self.tokens = min(self.tokens, self._most)
