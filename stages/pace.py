"""How fast the device works, as measured lately: what waits and deadlines are predicted from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from staged_pool.stages.budget import Budget


class Overlap:
    """How much of the device a batch had, where several run at once.

    Pure: it is told the time. While n batches run, each has 1/n of the device: seconds on the whole device are then
    comparable between a batch that ran alone and one that did not, and add up to how long the device needs for all.
    """

    def __init__(self) -> None:
        self.running = 0
        """Batches that have begun and not ended."""
        self._batch_s = 0.0
        """Seconds of all batches, those that ran at the same time added up."""
        self._now = 0.0

    def begin(self, now: float) -> tuple[float, float]:
        """Count a batch that begins; what is returned is for `end`."""
        self._advance(now)
        self.running += 1
        return now, self._batch_s

    def end(self, now: float, began: tuple[float, float]) -> float:
        """Count a batch that ends.

        Returns:
            The seconds that it took, divided by the mean number of batches that ran meanwhile.
        """
        self._advance(now)
        self.running -= 1
        seconds, batch_s = now - began[0], self._batch_s - began[1]
        return seconds * seconds / batch_s if batch_s > 0.0 else seconds

    def _advance(self, now: float) -> None:
        self._batch_s += self.running * (now - self._now)
        self._now = now


class Pace:
    """Fits seconds = fixed + tokens x each to the batches of late, by least squares with fading weights.

    Pure: it is told what a batch took. Both coefficients are kept at 0 or above. As long as all batches have been of
    about one size there is nothing to tell the two apart by, and all of it counts as fixed: a prediction for more
    tokens is then too short rather than too long, so that nothing is refused that might have been in time.

    Args:
        memory: Batches after which a batch counts 1/e. A shorter memory follows a change sooner; a longer one is
            misled less by an odd batch.
    """

    def __init__(self, memory: float = 30.0) -> None:
        self._fade = math.exp(-1.0 / memory)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a batch of `tokens` that took `seconds` of the whole device."""
        fade = self._fade
        self._weight = self._weight * fade + 1.0
        self._x = self._x * fade + tokens
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + tokens * tokens
        self._xy = self._xy * fade + tokens * seconds

    def _fit(self) -> tuple[float, float]:
        """Seconds of a batch, and of each of its tokens."""
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < (0.05 * mean_x) ** 2:  # sizes within 5 %: the slope would be noise
            return mean_y, 0.0
        each = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        fixed = mean_y - each * mean_x
        return (fixed, each) if fixed >= 0.0 else (0.0, mean_y / mean_x)

    def batch_s(self, tokens: float) -> float:
        """How long one batch of so many tokens takes; 0 as long as nothing has been observed."""
        fixed, each = self._fit()
        return fixed + each * tokens

    def drain_s(self, tokens: float, budget: int) -> float:
        """How long so many tokens take in batches of at most `budget` tokens; 0 for none."""
        fixed, each = self._fit()
        return math.ceil(tokens / budget) * fixed + each * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePace:
    """How fast one lane works: as fast as the slower of preprocess and the device, which work side by side."""

    budget: Budget
    """Of one batch."""
    device: Pace = field(default_factory=Pace)
    """Told the tokens of batches."""
    preprocess: Pace | None = None
    """Told the inputs of calls. None: preprocess is never the slower one."""

    def drain_s(self, tokens: float, inputs: float) -> float:
        """How long so many tokens for the device take, of which so many inputs are not prepared yet."""
        device_s = self.device.drain_s(tokens, self.budget.tokens)
        return device_s if self.preprocess is None else max(device_s, self.preprocess.drain_s(inputs, 1))
