"""The token budget of a batch, adapted to the device's speed and memory."""

from __future__ import annotations

from staged_pool.stages.scheduling.tuning import BUDGET_DECREASE, BUDGET_STEPS, QUEUE_IN_BATCHES


def queue_budget(tokens: float, requests: int, *, least: int, most: int) -> int:
    """Return the token budget of a batch that is cut from a queue: a fixed part of the tokens that wait.

    A request counts for at most a small batch. The fair queue takes requests in turns, so a single large request must
    not make batches large for all others.

    Args:
        tokens: Tokens that wait.
        requests: Requests that wait.
        least: Budget while the queue is short.
        most: Largest budget.
    """
    return min(most, max(least, int(min(tokens, requests * least)) // QUEUE_IN_BATCHES))


class Budget:
    """Token budget of a batch, by additive increase and multiplicative decrease (Chiu and Jain, 1989).

    Pure: callers report the time of each batch. A batch of less than half the budget changes nothing. A single item
    above the budget can only increase it. A decrease for lack of memory is undone step by step, like one for lack of
    time.

    Args:
        most: Largest budget, in tokens.
        start: Budget of the first batches, in tokens. None: `most`.
        target_s: Target duration of a forward, in seconds. None: any duration is fine.
    """

    def __init__(self, most: int, *, start: int | None = None, target_s: float | None = None) -> None:
        self._most = most
        self._target_s = target_s
        self.tokens = most if target_s is None or start is None else min(start, most)

    def observe(self, tokens: int, seconds: float, *, was_limit: bool) -> None:
        """Count a batch whose forward succeeded.

        Args:
            tokens: Tokens of the batch, padding included.
            seconds: Duration of its forward.
            was_limit: The budget cut this batch: more items waited.
        """
        if 2 * tokens < self.tokens:
            return
        step = max(1, self._most // BUDGET_STEPS)
        if self._target_s is not None and seconds > self._target_s:
            if tokens <= self.tokens:
                self.tokens = max(min(step, self.tokens), int(self.tokens * BUDGET_DECREASE))
        elif was_limit:
            self.tokens = min(self._most, self.tokens + step)

    def out_of_memory(self, tokens: int) -> None:
        """Set the budget to half a batch that the device had no memory for."""
        self.tokens = max(1, min(self.tokens, tokens // 2))
