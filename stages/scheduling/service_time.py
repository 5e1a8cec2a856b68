"""Service times: seconds of the device by number of tokens, from recent batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from staged_pool.stages.scheduling.batch_budget import Budget, queue_budget
from staged_pool.stages.scheduling.tuning import LEAST_VARIATION, SERVICE_SHAPE_BATCHES, SERVICE_TIME_BATCHES

STALL_FACTOR: Final = 10.0
"""Predicted times after which a forward counts as stalled.

A choice. Texts of 32,768 tokens take up to 6 times as long as short texts of as many tokens, because attention is
quadratic; a busy machine takes the rest.
"""

LEAST_STALL_S: Final = 1.0
"""Least seconds of a stalled forward. A process may lose its core, or be suspended, for some tenths of a second."""

STALL_LEARNED_BATCHES: Final = 8
"""Batches before a forward may count as stalled after `LEAST_STALL_S`. The first ones reserve memory."""

EARLY_STALL_S: Final = 10.0
"""Least seconds of a stalled forward until then. A choice: a kernel that is compiled takes some seconds."""


class DeviceShare:
    """The share of the device that each batch has while several run.

    Pure: callers pass the time. While n batches run, each has 1/n of the device. So the device seconds of batches are
    comparable, whether they ran alone or not, and add up to the time that the device was busy.
    """

    def __init__(self) -> None:
        self.running = 0
        """Number of batches that have begun and not ended."""
        self._batch_s = 0.0
        """Sum of the seconds of all batches; batches that ran at once add up."""
        self._now = 0.0

    def begin(self, now: float) -> tuple[float, float]:
        """Count a batch that begins. Returns the mark to pass to `end`."""
        self._advance(now)
        self.running += 1
        return now, self._batch_s

    def end(self, now: float, began: tuple[float, float]) -> float:
        """Count a batch that ends.

        Returns:
            Its seconds, divided by the mean number of batches that ran meanwhile.
        """
        self._advance(now)
        self.running -= 1
        seconds, batch_s = now - began[0], self._batch_s - began[1]
        return seconds * seconds / batch_s if batch_s > 0.0 else seconds

    def _advance(self, now: float) -> None:
        if now > self._now:  # the event loop may hear of ends out of order
            self._batch_s += self.running * (now - self._now)
            self._now = now


class ServiceTimeModel:
    """Fits seconds = fixed + tokens x each to recent batches.

    Pure: callers report the time of each batch. The speed of a device changes within seconds; the fixed part of a
    batch's time, in tokens, hardly changes. So the mean time comes from a few batches, and its dependence on size from
    a least-squares fit to many, with fading weights. Until sizes have differed, the whole time counts as fixed.
    Predictions for more tokens are then too short, and no request is rejected because of them.

    Items have no term of their own: an item costs a third of a token (`perf/NOTES.md`).
    """

    def __init__(self) -> None:
        self._late = _Moments(SERVICE_TIME_BATCHES)
        self._many = _Moments(SERVICE_SHAPE_BATCHES)
        self._fixed_tokens = math.inf
        """Tokens that take as long as the fixed part of a batch."""
        self.fixed_s = 0.0
        """Seconds of a batch that do not depend on its size."""
        self.each_s = 0.0
        """Seconds for each token."""
        self._batches = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a batch of `tokens` that took `seconds` of the whole device."""
        self._batches += 1
        self._late.add(tokens, seconds)
        mean_tokens, mean_s = self._late.means()
        if mean_s > 0.0:  # scaled to the present speed of the device
            worth = mean_tokens + (self._fixed_tokens if self._fixed_tokens < math.inf else 0.0)
            self._many.add(tokens, seconds / mean_s * worth)
            if (fixed_tokens := self._many.fixed_tokens()) is not None:
                self._fixed_tokens = fixed_tokens
        if self._fixed_tokens == math.inf:
            self.fixed_s, self.each_s = mean_s, 0.0
        else:
            self.each_s = mean_s / (self._fixed_tokens + mean_tokens)
            self.fixed_s = self.each_s * self._fixed_tokens  # mean_s minus the rest might round below 0

    @property
    def is_known(self) -> bool:
        """True after the first observation."""
        return self._batches > 0

    def drain_s(self, tokens: float, budget: int) -> float:
        """Return the seconds of `tokens` in batches of `budget`; 0 before the first observation."""
        return math.ceil(tokens / budget) * self.fixed_s + self.each_s * tokens

    def stall_s(self, tokens: int) -> float:
        """Return the seconds after which a forward of `tokens` counts as stalled.

        They are seconds of the whole device, infinite before the first observation. More tokens than usual may take
        longer in proportion, even while the fit takes the whole time for fixed: a first large batch is never a stall
        because only small ones came before.
        """
        if not self._batches:
            return math.inf
        mean_tokens, mean_s = self._late.means()
        least_s = EARLY_STALL_S if self._batches < STALL_LEARNED_BATCHES else LEAST_STALL_S
        return max(least_s, STALL_FACTOR * mean_s * max(1.0, tokens / mean_tokens))


class _Moments:
    """Weighted sums of batches, with fading weights."""

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
        """Return the mean tokens and seconds of a batch, after at least one."""
        return self._x / self._weight, self._y / self._weight

    def fixed_tokens(self) -> float | None:
        """Return the fixed part of a batch's time in tokens; None if sizes differ too little."""
        mean_x, mean_y = self.means()
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < (LEAST_VARIATION * mean_x) ** 2:
            return None
        each = (self._xy / self._weight - mean_x * mean_y) / variance
        return max(0.0, mean_y / each - mean_x) if each > 0.0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneServiceTime:
    """Service time of one lane: that of its bottleneck, preprocess or the device."""

    budget: Budget
    """Largest token budget of one batch."""
    least_tokens: int | None = None
    """Token budget of a batch while few requests wait. None: the largest one."""
    device: ServiceTimeModel = field(default_factory=ServiceTimeModel)
    """Learns from batches, by tokens."""
    preprocess: ServiceTimeModel | None = None
    """Learns from preprocess calls, by inputs. None: preprocess is never the bottleneck."""

    @property
    def is_known(self) -> bool:
        """True after the first batch."""
        return self.device.is_known

    def drain_s(self, tokens: float, inputs: float, requests: int) -> float:
        """Return the seconds that a lane needs for its tokens and its unprepared inputs.

        Its batches have the size that the batch former cuts from a queue of these requests.
        """
        most = self.budget.tokens
        least = most if self.least_tokens is None else min(self.least_tokens, most)
        device_s = self.device.drain_s(tokens, queue_budget(tokens, requests, least=least, most=most))
        return device_s if self.preprocess is None else max(device_s, self.preprocess.drain_s(inputs, 1))
