"""Service times: how long the device takes for so many tokens, as measured lately."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.tuning import LEAST_VARIATION, SERVICE_SHAPE_BATCHES, SERVICE_TIME_BATCHES


class DeviceShare:
    """The share of the device that a batch had, where several run at once.

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
        if now > self._now:  # ends are told in another order than they came about, now and then
            self._batch_s += self.running * (now - self._now)
            self._now = now


class ServiceTimeModel:
    """Fits seconds = fixed + tokens x each to recent batches.

    Pure: it is told what a batch took. The speed of a device changes from one second to the next; the fixed part of a
    batch's time, in tokens, hardly ever does. So the mean of a few batches says how long one takes, and a least-squares
    fit to many, with fading weights, how that depends on its size. Before sizes have differed, all of it counts as
    fixed: a prediction for more tokens is then too short rather than too long, and nothing is rejected for it.

    Items have no term of their own: an item is worth a third of a token (`python -m perf texts`).
    """

    def __init__(self) -> None:
        self._late = _Moments(SERVICE_TIME_BATCHES)
        self._many = _Moments(SERVICE_SHAPE_BATCHES)
        self._fixed_tokens = math.inf
        """Tokens that take as long as the fixed part."""
        self.fixed_s = 0.0
        """Seconds that a batch takes whatever its size."""
        self.each_s = 0.0
        """Seconds that each token adds."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a batch of `tokens` that took `seconds` of the whole device."""
        self._late.add(tokens, seconds)
        mean_tokens, mean_s = self._late.means()
        if mean_s > 0.0:  # as if the device had always been as fast
            worth = mean_tokens + (self._fixed_tokens if self._fixed_tokens < math.inf else 0.0)
            self._many.add(tokens, seconds / mean_s * worth)
            if (fixed_tokens := self._many.fixed_tokens()) is not None:
                self._fixed_tokens = fixed_tokens
        if self._fixed_tokens == math.inf:
            self.fixed_s, self.each_s = mean_s, 0.0
        else:
            self.each_s = mean_s / (self._fixed_tokens + mean_tokens)
            self.fixed_s = (
                self.each_s * self._fixed_tokens
            )  # not what is left of the mean: rounding makes that negative

    def drain_s(self, tokens: float, budget: int) -> float:
        """Seconds that so many tokens take, in batches of at most `budget` tokens; 0 before the first observation."""
        return math.ceil(tokens / budget) * self.fixed_s + self.each_s * tokens


class _Moments:
    """Means of batches, in which older ones count less and less."""

    __slots__ = ("_fade", "_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self, memory: float) -> None:
        self._fade = math.exp(-1.0 / memory)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        fade = self._fade
        self._weight = self._weight * fade + 1.0
        self._x = self._x * fade + tokens
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + tokens * tokens
        self._xy = self._xy * fade + tokens * seconds

    def means(self) -> tuple[float, float]:
        """Tokens and seconds of a batch; there has been one."""
        return self._x / self._weight, self._y / self._weight

    def fixed_tokens(self) -> float | None:
        """Tokens that take as long as the fixed part of a batch's time; None where sizes differ too little to say."""
        mean_x, mean_y = self.means()
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < (LEAST_VARIATION * mean_x) ** 2:
            return None
        each = (self._xy / self._weight - mean_x * mean_y) / variance
        return max(0.0, mean_y / each - mean_x) if each > 0.0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneServiceTime:
    """Service time of one lane: that of the slower of preprocess and the device, which work side by side."""

    budget: Budget
    """Token budget of one batch."""
    device: ServiceTimeModel = field(default_factory=ServiceTimeModel)
    """Told the tokens of batches."""
    preprocess: ServiceTimeModel | None = None
    """Told the inputs of calls. None: preprocess is never the slower one."""

    def drain_s(self, tokens: float, inputs: float) -> float:
        """Seconds that so many tokens take on the device, of which so many inputs are yet to be prepared."""
        device_s = self.device.drain_s(tokens, self.budget.tokens)
        return device_s if self.preprocess is None else max(device_s, self.preprocess.drain_s(inputs, 1))
